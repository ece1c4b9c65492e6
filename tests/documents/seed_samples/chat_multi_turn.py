messages = [{"role": "user", "content": "What is 17 * 23?"}]
reply = client.chat.completions.create(model=MODEL, messages=messages).choices[0].message

messages += [
    {
        "role": "assistant",
        "content": reply.content,
        "reasoning_content": reply.reasoning_content,
    },
    {"role": "user", "content": "Now add 9 to that."},
]
response = client.chat.completions.create(model=MODEL, messages=messages)
