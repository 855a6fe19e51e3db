<!-- Parameterised prompts (Prompt Cache, section 5.6.3 and appendix A.1.2). -->
<schema name="travel">
  <system>
    You are a world-renowned travel planner. You know where to stay, what to see and how to get there, and you keep to the time and the
    wishes that you are given.
  </system>
  <user>
    <module name="travel-plan">
      I'm gearing up for a memorable escape and need your help to plan it. I can be away for
      <parameter name="duration" length="5"/> and would like every day to have one highlight and some time to rest.
      <union>
        <module name="domestic">
          My eyes are set on a place in my own country, the city of <parameter name="city" length="10"/>.
          Given its domestic charm, I would like to see what visitors from abroad usually miss.
        </module>
        <module name="overseas">
          I'm yearning to tread on foreign ground and to hear a language that I do not speak.
          <union>
            <module name="maldives">
              The Maldives beckons with low white islands, lagoons as clear as glass, and reefs where turtles and rays pass by.
            </module>
            <module name="amazon">
              The vast expanse of the Amazon calls: a river like a sea, a forest that never falls silent, and nights in a hammock.
            </module>
            <module name="sahara">
              The golden embrace of the Sahara is what I want: dunes at dawn, tea by the fire, and more stars than I can count.
            </module>
            <module name="tokyo">
              Tokyo, Japan's bustling, bright capital, draws me with its shrines and towers, its markets and its quiet side streets.
            </module>
            <module name="rome">
              The eternal city of Rome is my dream: arches and fountains, long lunches, and history under every stone.
            </module>
            <module name="capetown">
              Cape Town, nestled at the foot of Table Mountain, has beaches, vineyards and penguins within one day's drive.
            </module>
            <module name="sydney">
              Sydney, the shimmering harbour city, offers surf before breakfast and opera after dinner.
            </module>
            <module name="buenosaires">
              Buenos Aires, Argentina's city of tango, promises late nights, old cafes and a book shop in a theatre.
            </module>
          </union>
        </module>
      </union>
    </module>
  </user>
  <assistant>
    I'd love to help. I've carefully read the city and the time that you have in mind. What would you like me to do?
  </assistant>
</schema>
