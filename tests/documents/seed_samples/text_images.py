from os import getenv

import httpx

body = {
    "model": "thinkingmachines/Inkling:peft:262144",
    "prompt_chunks": [
        {"type": "tokens", "tokens": before_image},  # up to and including the image start tokens
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}},
        {"type": "tokens", "tokens": after_image},  # the image end tokens and the rest of the prompt
    ],
    "max_tokens": 100,
}
response = httpx.post(
    "https://tinker.thinkingmachines.dev/services/tinker-prod/oai/api/v1/completions",
    headers={"Authorization": f"Bearer {getenv('TINKER_API_KEY')}"},
    json=body,
)
print(response.json()["choices"][0]["text"])
