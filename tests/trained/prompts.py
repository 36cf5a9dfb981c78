"""A hundred conversations of all kinds, for a small trained model."""

from __future__ import annotations

__all__ = ["CONVERSATIONS"]

SYSTEM = (
    "You are the assistant of a small library in a harbour town. The library opens at nine and "
    "closes at six, on Sundays it is closed. Books may be kept for three weeks. A card costs five "
    "crowns a year, for children nothing. Answer in one or two sentences."
)
LIBRARY = """\
When does the library open?
How long may I keep a book?
What does a card cost for my daughter, who is eight?
Are you open on Sunday?
Can I bring back a book at seven in the evening?
Where is the library?
Write a notice that says when the library is closed.
List what a new reader should know.
Is a card for a year more than ten crowns?
Say the opening hours in German."""

TEXTS = """\
What is the capital of France?
Name three primary colours.
Why is the sky blue? Answer in two sentences.
Write a haiku about rain.
What is 17 + 25?
What is 12 times 12? Show the steps.
If a train leaves at 9:40 and arrives at 11:05, how long does it take?
Which is heavier: a kilogram of feathers or a kilogram of iron?
Explain photosynthesis to a child.
What does the word 'ephemeral' mean?
Give me a synonym for 'happy'.
Translate to French: The cat sleeps on the chair.
Translate to Spanish: Good morning, how are you?
Translate to German: I would like a cup of coffee.
Summarise in one sentence: The ship left the harbour before dawn, with forty sailors and no map.
Write a limerick about a baker.
Who wrote 'Romeo and Juliet'?
What is the boiling point of water in degrees Celsius?
List the days of the week.
List five fruits, one on each line, with a number.
Make a shopping list for pancakes.
Give three tips for sleeping well, as bullet points.
Make a table in Markdown with two countries and their capitals.
Write a to-do list for moving house. Use - [ ] for each item.
Give the steps of making tea as a numbered list.
Write a Python function that adds two numbers.
Write a Python function `is_prime(n)`.
What does this print?\\n\\n```python\\nfor i in range(3):\\n    print(i * i)\\n```
Find the mistake: `def f(x) return x + 1`
Write a SQL query that counts the rows of the table users.
Write an HTML page with a heading and a paragraph.
Write a shell command that lists files by size.
Write a JavaScript function that reverses a string.
Explain what a list comprehension is, with an example.
What is the difference between a list and a tuple in Python?
Write a regular expression for a date like 2024-01-31.
Write C code that prints the numbers 1 to 10.
Answer in JSON with the keys name and age: Ana is 31 years old.
Give a JSON object with a city and its country.
Give a JSON list of three colours.
Is this valid JSON? {"a": [1, 2, 3], "b": null}
Turn into JSON: title: Dune; author: Frank Herbert; year: 1965
Write YAML for a person with a name and two hobbies.
What does 😀 mean?
Reply only with emoji: how are you today?
Which animal is this? 🐘
Write a sentence with the emoji 🌧️ and ☂️ in it.
🇫🇷 + 🥖 = ?
Count the emoji: 🍎🍎🍐
Was ist die Hauptstadt von Österreich?
Schreibe einen kurzen Satz über den Winter.
Quelle est la capitale de l'Italie ?
Écris une phrase sur la mer.
¿Cuál es la capital de España?
Escribe una lista de tres animales.
Qual è la capitale d'Italia?
Qual é a capital do Brasil?
Wat is de hoofdstad van Nederland?
Jaka jest stolica Polski?
Столица России?
Напиши одно предложение о зиме.
Ποια είναι η πρωτεύουσα της Ελλάδας;
Türkiye'nin başkenti neresidir?
ما هي عاصمة مصر؟
भारत की राजधानी क्या है?
中国的首都是哪里?
请写一句关于春天的话。
日本の首都はどこですか?
한국의 수도는 어디입니까?
Hvad hedder Danmarks hovedstad?
Vad heter Sveriges huvudstad?
Mikä on Suomen pääkaupunki?
Which number comes next: 2, 4, 8, 16?
Write the alphabet backwards.
Spell 'necessary'.
Repeat exactly: a  b   c\\t\\td
Repeat after me: <b>bold</b> & "quoted" \\\\ backslash
What is the opposite of 'ancient'?
Complete: Roses are red,
Tell me a joke about computers."""

MORE = (
    ("Hello, who are you?", "I am an assistant.", "What can you do for me?"),
    ("My name is Ana.", "Nice to meet you, Ana!", "What is my name?"),
    ("Name a river.", "The Danube.", "Through which countries does it flow?"),
    ("What is 3 + 4?", "7", "And twice that?"),
    ("Write a word that rhymes with cat.", "Hat.", "Another one, please."),
    ("Say 'yes'.", "yes", "Now in French."),
    ("I have two apples and eat one.", "Then you have one apple.", "And if I buy five more?"),
    ("Write a line of a poem.", "The river keeps the moon awake.", "Write the next line."),
    ("What is HTML?", "A language for web pages.", "And CSS?"),
    ("Pick a number from 1 to 10.", "7", "Is it odd?"),
)


def _written(text: str) -> str:
    """With line breaks and tabs where they are spelled."""
    return text.replace("\\n", "\n").replace("\\t", "\t").replace("\\\\", "\\")


def _messages(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


CONVERSATIONS = [
    *([{"role": "system", "content": SYSTEM}, *_messages(one)] for one in LIBRARY.splitlines()),
    *(_messages(_written(text)) for text in TEXTS.splitlines()),
    *(_messages(*texts) for texts in MORE),
]
