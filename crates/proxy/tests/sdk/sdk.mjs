// The OpenAI SDK for Node through the proxy: the same answers as without it.
// usage: node sdk.mjs DIRECT PROXY

import assert from "node:assert";
import OpenAI from "openai";

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

async function same(what, call) {
  const bases = process.argv.slice(2);
  const clients = bases.map((base) => new OpenAI({ apiKey: "sk-test", baseURL: `${base}/v1` }));
  const [direct, through] = await Promise.all(clients.map(call));
  assert.deepStrictEqual(plain(through), plain(direct), what);
  console.log("same in Node:", what);
}

await same("chat", (client) => client.chat.completions.create({ model: "m", messages }));
await same("chat, streamed", (client) => all(client.chat.completions.create({ model: "m", messages, stream: true })));
await same("responses", (client) => client.responses.create({ model: "m", input: "hi" }));
await same("responses, streamed", (client) => all(client.responses.create({ model: "m", input: "hi", stream: true })));
