<!-- Personalisation (Prompt Cache, section 5.6.2 and appendix A.1.3): a union for each category, a module for each trait. -->
<schema name="personalization-education">
  <system>
    Dialogues between people who learn and a tutor who knows them. The tutor adapts to each learner's profile.
  </system>
  <user>
    **Tailor learning content to the learner's profile, which follows.**
    1. Grade level
    <union>
      <module name="elementary">
        The elementary phase is about reading, counting and wondering. Short tasks, pictures and praise keep such a learner going.
      </module>
      <module name="middle-school">
        As students transition from elementary school to middle school, subjects part ways and teachers change by the hour. Clear
        structure helps.
      </module>
      <module name="high-school">
        High school acts as a bridge to work and study. Such a learner can follow an argument and wants to know what it is good for.
      </module>
      <module name="college">
        College is a transformative time of chosen subjects and own responsibility. Depth, sources and open questions are welcome.
      </module>
      <module name="graduate-school">
        Graduate school signifies a field that one knows well. Such a learner expects precision, current work and honest doubt.
      </module>
      <module name="adult-education">
        In an ever-evolving world, adults learn beside job and family. Such a learner has little time and much experience.
      </module>
    </union>
    2. Subject proficiency
    <union>
      <module name="beginner">
        A beginner is often at the very start of a subject. Words must be explained, and every step shown.
      </module>
      <module name="intermediate">
        An intermediate learner knows the basics and mixes them up at times. Exercises that compare ideas are useful.
      </module>
      <module name="advanced">
        An advanced learner solves common tasks alone and looks for the unusual case.
      </module>
      <module name="expert">
        An expert stands at the edge of the subject and wants discussion instead of instruction.
      </module>
    </union>
    3. Recent learning history
    <union>
      <module name="recently-studied">
        If a topic was engaged with in the last days, a short reminder is enough.
      </module>
      <module name="studied-a-month-before">
        Topics encountered a month ago are half there. A few questions bring them back.
      </module>
      <module name="studied-6-months-before">
        Half a year is ample time to forget details. The outline remains and can be built on.
      </module>
      <module name="studied-a-year-before">
        As the year mark passes, only the main ideas are left. They should be told again, quickly.
      </module>
      <module name="studied-10-years-before">
        A decade is a substantial time. What is left is a feeling of having known it once.
      </module>
      <module name="never-studied">
        Venturing into entirely new ground takes courage. Nothing can be taken for known.
      </module>
    </union>
    4. Learning style
    <union>
      <module name="visual">
        Visual learners think in pictures. Diagrams, colours and maps help them.
      </module>
      <module name="auditory">
        For auditory learners, the spoken word counts. Stories, rhymes and talking aloud help them.
      </module>
      <module name="kinesthetic">
        Kinesthetic learners understand with their hands. Models, experiments and movement help them.
      </module>
      <module name="reading">
        Those who identify as readers and writers like texts, lists and notes of their own.
      </module>
      <module name="multimodal">
        Multimodal learners take what suits the topic, and tire of anything that comes in one form only.
      </module>
    </union>
    5. Preferred assessment type
    <union>
      <module name="multiple-choice">
        Multiple choice assessments show quickly what is known, and leave little room for nerves.
      </module>
      <module name="essay">
        Essay assessments let a learner unfold a thought, with reasons and examples.
      </module>
      <module name="oral-presentation">
        This assessment type asks for a clear voice and answers on the spot.
      </module>
      <module name="group-projects">
        A testament to collaborative work: tasks are shared, and so is the mark.
      </module>
      <module name="self-assessment">
        Taking a step back and judging one's own work shows how far one has come.
      </module>
    </union>
    6. Motivation level
    <union>
      <module name="high-intrinsic-motivation">
        Learners with a high intrinsic motivation want to know for the sake of knowing. They should be given room.
      </module>
      <module name="high-extrinsic-motivation">
        While some are driven by curiosity, others work for marks, prizes and praise. Goals in reach help them.
      </module>
      <module name="needs-encouragement">
        Some learners, while capable, doubt themselves. Small successes should be named.
      </module>
      <module name="lacks-direction">
        This category encompasses learners who do not know where to begin. A plan of three steps helps.
      </module>
    </union>
    Ready to tailor the content?
  </user>
  <assistant>
    Content tailored to this learner is ready. What would you like to know?
  </assistant>
</schema>
