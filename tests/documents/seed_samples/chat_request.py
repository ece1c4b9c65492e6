response = client.chat.completions.create(
    model=MODEL,
    messages=[{"role": "user", "content": "What is 17 * 23?"}],
    max_completion_tokens=256,
    temperature=0.7,
)
print(response.choices[0].message.reasoning_content)
print(response.choices[0].message.content)
