<prompt schema="travel">
  <travel-plan duration="a week">
    <overseas>
      <tokyo/>
    </overseas>
  </travel-plan>
  <user>Create a travel plan.</user>
</prompt>
