// The official OpenAI client for JavaScript against a running gateway, which `test_openai_js.py` starts.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import OpenAI from 'openai';

const { url, keys, messages, answers } = JSON.parse(process.env.KVRELAY_ACCEPTANCE);
const client = (apiKey = keys.default, options = {}) =>
  new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0, ...options });
const openai = client();
const chat = { model: 'auto', messages };

const collect = async (stream) => {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
};

const raised = async (work, kind, status, code) => {
  const error = await work.then(() => assert.fail('nothing was raised'), (error) => error);
  assert.ok(error instanceof kind, `${error.constructor.name}: ${error.message}`);
  assert.deepEqual([error.status, error.code], [status, code]);
  return error;
};

test('a completion', async () => {
  const reply = await openai.chat.completions.create({ ...chat, logprobs: true });
  assert.equal(reply.choices[0].message.content, answers.small);
  assert.equal(reply.choices[0].finish_reason, 'stop');
  assert.equal(reply.choices[0].logprobs.content[0].logprob, -0.125);
  assert.equal(reply.usage.total_tokens, reply.usage.prompt_tokens + reply.usage.completion_tokens);
  assert.equal(reply.kvrelay.tier, 'small');
});

test('headers and the kvrelay field', async () => {
  const { data, response } = await openai.chat.completions
    .create({ ...chat, kvrelay: { policy: 'always_escalate' } })
    .withResponse();
  assert.equal(data.choices[0].message.content, answers.large);
  assert.equal(response.headers.get('x-kvrelay-path'), data.kvrelay.path);
  assert.match(response.headers.get('x-request-id'), /^[0-9a-f]{32}$/);
});

test('a stream', async () => {
  const options = { ...chat, stream: true, stream_options: { include_usage: true } };
  const chunks = await collect(await openai.chat.completions.create(options));
  assert.equal(chunks[0].choices[0].delta.role, 'assistant');
  assert.equal(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? '').join(''), answers.small);
  assert.deepEqual(chunks.at(-1).choices, []);
  assert.ok(chunks.at(-1).usage.completion_tokens > 0);
});

test('the stream helper', async () => {
  const whole = await openai.chat.completions.stream(chat).finalChatCompletion();
  assert.equal(whole.choices[0].message.content, answers.small);
});

test('a text completion, whole and as a stream', async () => {
  const request = { model: 'small', prompt: 'Once upon a time' };
  const whole = await openai.completions.create(request);
  assert.equal(whole.object, 'text_completion');
  const chunks = await collect(await openai.completions.create({ ...request, stream: true }));
  assert.equal(chunks.map((chunk) => chunk.choices[0]?.text ?? '').join(''), whole.choices[0].text);
});

test('models', async () => {
  const names = (await openai.models.list()).data.map((model) => model.id);
  assert.deepEqual(names.slice(0, 3), ['auto', 'small', 'fake-small']);
  assert.equal((await openai.models.retrieve('large')).id, 'large');
  await raised(openai.models.retrieve('gpt-17'), OpenAI.NotFoundError, 404, 'model_not_found');
});

test('bad requests name the field', async () => {
  const warm = { ...chat, temperature: 9 };
  const bad = await raised(openai.chat.completions.create(warm), OpenAI.BadRequestError, 400, 'invalid_request');
  assert.deepEqual([bad.type, bad.param], ['invalid_request_error', 'temperature']);
  assert.match(bad.message, /less than or equal to 2; got 9/);
  const json = { ...chat, response_format: { type: 'json_object' } };
  await raised(openai.chat.completions.create(json), OpenAI.BadRequestError, 400, 'invalid_request');
  const other = { ...chat, model: 'gpt-17' };
  await raised(openai.chat.completions.create(other), OpenAI.NotFoundError, 404, 'model_not_found');
});

test('keys', async () => {
  const { AuthenticationError, PermissionDeniedError, RateLimitError } = OpenAI;
  await raised(client('none').chat.completions.create(chat), AuthenticationError, 401, 'invalid_api_key');
  const large = { ...chat, model: 'large' };
  const limited = client(keys.limited);
  await raised(limited.chat.completions.create(large), PermissionDeniedError, 403, 'permission_denied');
  const error = await raised(limited.chat.completions.create(chat), RateLimitError, 429, 'rate_limit_exceeded');
  assert.ok(Number(error.headers.get('retry-after')) >= 1);
});

test('an overloaded worker', async () => {
  const request = { model: 'large', prompt: 'Once' };
  const error = await raised(openai.completions.create(request), OpenAI.InternalServerError, 503, 'overloaded');
  assert.equal(error.headers.get('retry-after'), '3');
});

test('a broken stream raises', async () => {
  const stream = await openai.chat.completions.create({ ...chat, model: 'broken', stream: true });
  await assert.rejects(collect(stream), OpenAI.APIError);
});

test('an abort during a stream stops the worker', async () => {
  const stream = await openai.chat.completions.create({ ...chat, model: 'slow', stream: true });
  let count = 0;
  for await (const chunk of stream) {
    count += chunk.choices.length;
    if (count === 3) stream.controller.abort();
  }
  assert.ok(count < 6, `${count} chunks`);
});

test('an abort before the answer', async () => {
  const abort = new AbortController();
  const answer = openai.chat.completions.create({ ...chat, model: 'slow' }, { signal: abort.signal });
  setTimeout(() => abort.abort(), 100);
  await assert.rejects(answer, OpenAI.APIUserAbortError);
});
