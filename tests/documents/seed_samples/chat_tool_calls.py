import json

tools = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
messages = [{"role": "user", "content": "What's the weather in Paris?"}]
reply = client.chat.completions.create(model=MODEL, messages=messages, tools=tools).choices[0].message

if reply.tool_calls:  # None when the model answers with text only
    messages.append(
        {
            "role": "assistant",
            "content": reply.content,
            "reasoning_content": reply.reasoning_content,
            "tool_calls": [call.model_dump() for call in reply.tool_calls],
        }
    )
    for call in reply.tool_calls:  # the model can call more than one function
        args = json.loads(call.function.arguments)  # {"city": "Paris"}
        result = {"city": args["city"], "temp_c": 18}  # run your own function here
        messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
    response = client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
