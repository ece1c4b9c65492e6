const stream = await client.completions.create({
  model: "<model-slug>",
  prompt: "The three primary colors are",
  max_tokens: 32,
  stream: true,
});

for await (const chunk of stream) {
  process.stdout.write(chunk.choices[0]?.text ?? "");
}
