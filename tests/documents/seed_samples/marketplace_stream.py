stream = client.completions.create(
    model="<model-slug>",
    prompt="The three primary colors are",
    max_tokens=32,
    stream=True,
)

for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].text, end="")
