response = client.chat.completions.create(
    model=MODEL,
    messages=[{"role": "user", "content": "What is 17 * 23?"}],
)
print(response.choices[0].message.content)
