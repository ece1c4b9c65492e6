stream = client.chat.completions.create(
    model=MODEL,
    messages=[{"role": "user", "content": "What is 17 * 23?"}],
    stream=True,
    stream_options={"include_usage": True},
)
part = None
for chunk in stream:
    if chunk.choices:
        delta = chunk.choices[0].delta
        parts = {"Reasoning": delta.reasoning_content, "Answer": delta.content}
        for name, text in parts.items():
            if text:
                if name != part:
                    print(f"\n[{name}]")
                    part = name
                print(text, end="", flush=True)
    if chunk.usage:
        print("\nTokens:", chunk.usage.total_tokens)
