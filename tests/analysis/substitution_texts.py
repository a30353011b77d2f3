"""Texts of wpr-pico's kind, for analyses of words in context."""

STORIES = [
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the sunshine with her friends.",
    "One day, a boy named Tom found a big box in the park. He wanted to open the box and see what was inside.",
    "The little dog was very sad because he lost his ball. His mom said they would look for the ball together.",
    "Lily and her mom went to the store to buy some apples. Lily was very happy and she gave her mom a big hug.",
    "There was a small bird who lived in a tall tree. Every day the bird would fly high in the sky and sing a song.",
    "Tim had a red toy car that he liked to play with. He played with the car all day long and was very happy.",
]
