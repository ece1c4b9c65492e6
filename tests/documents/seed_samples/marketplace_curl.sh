curl https://inference.tokenchange.io/v1/completions \
  -H "Content-Type: application/json" \
  -H "Authorization: Bearer $TOKENCHANGE_API_KEY" \
  -d '{
    "model": "<model-slug>",
    "stream": true,
    "max_tokens": 32,
    "prompt": "The three primary colors are"
  }'
