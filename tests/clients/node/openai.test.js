// openai-node against a running service; test_clients.py starts both.
import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";
import { zodFunction } from "openai/helpers/zod";
import { z } from "zod";

const { ROUNDHOUSE_URL, ROUNDHOUSE_KEY, ROUNDHOUSE_ONE_AT_A_TIME } = process.env;
const { ROUNDHOUSE_BASE: BASE, ROUNDHOUSE_QUILL: QUILL, ROUNDHOUSE_TOOLS: TOOLS } = process.env;

const client = new OpenAI({ baseURL: ROUNDHOUSE_URL, apiKey: ROUNDHOUSE_KEY });
const CODE_WORD = [{ role: "user", content: "What is the code word?" }];
const ANSWER = "The code word is zephyr-42. -- Quill";
const PARIS = [{ role: "user", content: "What's the weather in Paris?" }];
const WEATHER = {
  type: "function",
  function: {
    name: "get_weather",
    description: "Get the current weather in a city.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
};

/** A client that keeps the status of every answer that it got. */
function countingClient(apiKey, options) {
  const statuses = [];
  const counted = new OpenAI({
    baseURL: ROUNDHOUSE_URL,
    apiKey,
    ...options,
    fetch: async (...request) => {
      const response = await fetch(...request);
      statuses.push(response.status);
      return response;
    },
  });
  return { counted, statuses };
}

test("models are listed and retrieved by their ids", async () => {
  const listed = [];
  for await (const model of client.models.list()) listed.push(model.id);
  assert.ok(listed.includes(BASE));
  for (const name of [BASE, QUILL, `${BASE};${QUILL}`]) {
    assert.equal((await client.models.retrieve(name)).id, name);
  }
});

test("a chat answers whole and streamed alike", async () => {
  const options = { model: QUILL, messages: CODE_WORD, temperature: 0 };
  const whole = await client.chat.completions.create(options);
  assert.equal(whole.choices[0].message.content, ANSWER);
  const stream = await client.chat.completions.create({
    ...options,
    stream: true,
    stream_options: { include_usage: true },
  });
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  assert.equal(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""), ANSWER);
  assert.deepEqual(chunks.at(-1).choices, []);
  assert.equal(chunks.at(-1).usage.completion_tokens, whole.usage.completion_tokens);
});

test("the stream helper ends with the whole reply", async () => {
  const stream = client.chat.completions.stream({ model: QUILL, messages: CODE_WORD, temperature: 0 });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  const final = await stream.finalChatCompletion();
  assert.equal(text, ANSWER);
  assert.equal(final.choices[0].message.content, ANSWER);
  assert.equal(final.choices[0].finish_reason, "stop");
});

test("the stream helper puts tool calls together", async () => {
  const stream = client.chat.completions.stream({ model: TOOLS, messages: PARIS, tools: [WEATHER], temperature: 0 });
  const { choices } = await stream.finalChatCompletion();
  const [call] = choices[0].message.tool_calls;
  assert.equal(call.function.name, "get_weather");
  assert.deepEqual(JSON.parse(call.function.arguments), { city: "Paris" });
  assert.equal(choices[0].finish_reason, "tool_calls");
});

test("tools run by themselves until there is an answer", async () => {
  const asked = [];
  const runner = client.chat.completions.runTools({
    model: TOOLS,
    messages: PARIS,
    temperature: 0,
    tools: [
      {
        ...WEATHER,
        function: {
          ...WEATHER.function,
          parse: JSON.parse,
          function: ({ city }) => {
            asked.push(city);
            return { temp_c: 18 };
          },
        },
      },
    ],
  });
  assert.match(await runner.finalContent(), /18/);
  assert.deepEqual(asked, ["Paris"]);
});

test("parse reads tool calls into their schema", async () => {
  const parameters = z.object({ city: z.string() });
  const tool = zodFunction({ name: "get_weather", description: "Get the current weather in a city.", parameters });
  const parsed = await client.chat.completions.parse({ model: TOOLS, messages: PARIS, tools: [tool], temperature: 0 });
  assert.deepEqual(parsed.choices[0].message.tool_calls[0].function.parsed_arguments, { city: "Paris" });
});

test("the raw response has headers beside the parsed reply", async () => {
  const { data, response, request_id } = await client.chat.completions
    .create({ model: QUILL, messages: CODE_WORD, temperature: 0 }, { headers: { "x-request-id": "rh-node-1" } })
    .withResponse();
  assert.equal(data.choices[0].message.content, ANSWER);
  assert.equal(response.headers.get("x-request-id"), "rh-node-1");
  assert.equal(request_id, "rh-node-1");
});

test("completions take text and token ids", async () => {
  const asked = { model: BASE, max_tokens: 6, temperature: 0, return_token_ids: true };
  const first = (await client.completions.create({ ...asked, prompt: "The capital of France is" })).choices[0];
  const again = (await client.completions.create({ ...asked, prompt: first.prompt_token_ids, logprobs: 2 })).choices[0];
  assert.deepEqual(again.token_ids, first.token_ids);
  assert.equal(again.text, first.text);
  assert.equal(again.logprobs.token_logprobs.length, 6);
});

for (const [name, kind, status, ask] of [
  ["400", OpenAI.BadRequestError, 400, (c) => c.completions.create({ model: BASE, prompt: "x", temperature: -1 })],
  ["404", OpenAI.NotFoundError, 404, (c) => c.completions.create({ model: "no/such", prompt: "x" })],
  [
    "422",
    OpenAI.UnprocessableEntityError,
    422,
    (c) =>
      c.chat.completions.create({
        model: TOOLS,
        messages: [{ role: "user", content: "Hello!" }],
        tools: [WEATHER],
        tool_choice: "required",
        temperature: 0,
      }),
  ],
]) {
  test(`a refusal with ${name} is its own class and is sent once`, async () => {
    const { counted, statuses } = countingClient(ROUNDHOUSE_KEY, { maxRetries: 2 });
    await assert.rejects(ask(counted), (error) => error instanceof kind && error.status === status && !!error.requestID);
    assert.deepEqual(statuses, [status]);
  });
}

test("a wrong key is an authentication error", async () => {
  const { counted } = countingClient("wrong", {});
  await assert.rejects(counted.models.retrieve(BASE), OpenAI.AuthenticationError);
});

test("a stream that fails on its way throws", async () => {
  const stream = await client.chat.completions.create({
    model: TOOLS,
    messages: [{ role: "user", content: "Hello!" }],
    tools: [WEATHER],
    tool_choice: "required",
    temperature: 0,
    stream: true,
  });
  await assert.rejects(async () => {
    for await (const chunk of stream) assert.ok(chunk.id);
  }, OpenAI.APIError);
});

test("a busy key is tried again until it is free", async () => {
  const { counted, statuses } = countingClient(ROUNDHOUSE_ONE_AT_A_TIME, { maxRetries: 5 });
  const asked = { model: BASE, prompt: "Once upon a time" };
  const running = await counted.completions.create({ ...asked, max_tokens: 2000, stream: true });
  const waiting = counted.completions.create({ ...asked, max_tokens: 4 });
  for await (const chunk of running) {
    assert.ok(chunk.id);
    if (statuses.includes(429)) break; // leaving the loop aborts the request
  }
  assert.equal((await waiting).usage.completion_tokens, 4);
  assert.deepEqual([...new Set(statuses)], [200, 429]);
});

test("an aborted request leaves the client usable", async () => {
  const controller = new AbortController();
  const stream = await client.completions.create(
    { model: BASE, prompt: "x", max_tokens: 2000, stream: true },
    { signal: controller.signal },
  );
  for await (const chunk of stream) {
    assert.ok(chunk.id);
    controller.abort();
  }
  assert.ok((await client.models.retrieve(BASE)).id);
});
