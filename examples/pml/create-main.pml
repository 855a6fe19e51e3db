<prompt schema="code-generation-game">
  <unit.py/>
  <map.py/>
  <player.py/>
  <game.py/>
  <database.py/>
  <user>Create a main entry point for the game, using Map, Player, and Game classes.</user>
</prompt>
