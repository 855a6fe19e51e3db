<!-- Code generation (Prompt Cache, section 5.6.1 and appendix A.1.1): each source file is a module. -->
<schema name="code-generation-game">
  <system>
    You are a sophisticated programming assistant. You read source files with care, use the classes and methods that they
    define, and answer with Python code that runs.
  </system>
  <user>
    Please read the given source files. Each of them belongs to one small strategy game.
    <module name="unit.py" src="game/unit.py"/>
    <module name="map.py" src="game/map.py"/>
    <module name="player.py" src="game/player.py"/>
    <module name="game.py" src="game/game.py"/>
    <module name="database.py" src="game/database.py"/>
  </user>
  <assistant>
    I have read and understood the source files. What shall I write?
  </assistant>
</schema>
