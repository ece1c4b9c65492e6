curl https://tinker.thinkingmachines.dev/services/tinker-prod/oai/api/v1/chat/completions \
  -H "Authorization: Bearer $TINKER_API_KEY" \
  -H "Content-Type: application/json" \
  -d '{
    "model": "thinkingmachines/Inkling:peft:262144",
    "messages": [{"role": "user", "content": "What is 17 * 23?"}],
    "reasoning_effort": "high"
  }'
