response = client.completions.create(
    model="Qwen/Qwen3.5-9B-Base",
    prompt=tokens,  # token IDs from your own renderer or the model's tokenizer
    max_tokens=50,
    extra_body={"return_token_ids": True},
)
choice = response.choices[0]
print(choice.token_ids)         # the generated token IDs
print(choice.prompt_token_ids)  # the prompt token IDs
