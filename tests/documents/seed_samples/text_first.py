response = client.completions.create(
    model="Qwen/Qwen3.5-9B-Base",
    prompt="The capital of France is",
    max_tokens=50,
)
print(response.choices[0].text)
