from os import getenv
from openai import OpenAI

MODEL = "thinkingmachines/Inkling:peft:262144"

client = OpenAI(
    base_url="https://tinker.thinkingmachines.dev/services/tinker-prod/oai/api/v1",
    api_key=getenv("TINKER_API_KEY"),
)

response = client.chat.completions.create(
    model=MODEL,
    messages=[{"role": "user", "content": "What is 17 * 23?"}],
)
print(response.choices[0].message.content)
