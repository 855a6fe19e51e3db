<prompt schema="personalization-education">
  <middle-school/>
  <beginner/>
  <studied-a-year-before/>
  <auditory/>
  <essay/>
  <high-intrinsic-motivation/>
  <user>Concisely describe the learner's profile.</user>
</prompt>
