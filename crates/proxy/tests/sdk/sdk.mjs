// The OpenAI SDK for Node through the proxy: the same answers as without it, errors too. The last stream is cancelled.
// usage: node sdk.mjs DIRECT PROXY SMALL_DIRECT SMALL_PROXY SLOW_PROXY, where small ones refuse what is large

import assert from "node:assert";
import OpenAI from "openai";

const [direct, proxy, smallDirect, smallProxy, slowProxy] = process.argv.slice(2);
const messages = [{ role: "user", content: "hello" }];

function plain(value) {
  if (Array.isArray(value)) return value.map(plain);
  if (value === null || typeof value !== "object") return value;
  const moving = ["id", "created", "created_at", "item_id", "_request_id"];
  const kept = Object.entries(value).filter(([key]) => !moving.includes(key));
  return Object.fromEntries(kept.map(([key, inner]) => [key, plain(inner)]));
}

async function all(stream) {
  const items = [];
  for await (const item of await stream) items.push(item);
  return items;
}

function client(base) {
  return new OpenAI({ apiKey: "sk-test", baseURL: `${base}/v1`, maxRetries: 0 });
}

async function same(what, call, bases = [direct, proxy]) {
  const [wanted, through] = await Promise.all(bases.map(client).map(call));
  assert.deepStrictEqual(plain(through), plain(wanted), what);
  console.log("same in Node:", what);
}

await same("chat", (client) => client.chat.completions.create({ model: "m", messages }));
await same("chat, streamed", (client) => all(client.chat.completions.create({ model: "m", messages, stream: true })));
await same("responses", (client) => client.responses.create({ model: "m", input: "hi" }));
await same("responses, streamed", (client) => all(client.responses.create({ model: "m", input: "hi", stream: true })));
async function refusal(client) {
  const call = client.responses.create({ model: "m", input: "x".repeat(100) });
  const error = await call.then(() => assert.fail("a request that is too large was accepted"), (error) => error);
  assert(error instanceof OpenAI.RateLimitError, error);
  return { status: error.status, error: error.error };
}
await same("an error", refusal, [smallDirect, smallProxy]);

const stream = await client(slowProxy).chat.completions.create({ model: "m", messages, stream: true });
for await (const item of stream) {
  assert(item.choices);
  break;
}
stream.controller.abort();
console.log("cancelled in Node: a stream");
