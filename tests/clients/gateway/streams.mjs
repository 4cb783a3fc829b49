// A run's log read by the client of Durable Streams: node streams.mjs BASE RUN; prints what each way of reading had.
import { stream } from "@durable-streams/client";

const [base, run] = process.argv.slice(2);
const url = `${base}/v1/stream/${encodeURIComponent(run)}`;
const read = async (live, offset = "-1") => {
  const answer = await stream({ url, live, offset, json: true });
  const events = [];
  await new Promise((done, failed) => {
    answer.subscribeJson(async (batch) => {
      events.push(...batch.items);
      if (batch.streamClosed || batch.items.at(-1)?.type === "completed") done();
    });
    answer.closed.then(done, failed);
  });
  return events;
};
const head = await fetch(url, { method: "HEAD" });
const get = async (query) => {
  const answer = await fetch(url + query);
  return [answer.status, Object.fromEntries(answer.headers), await answer.text()];
};
console.log(
  JSON.stringify({
    once: await (await stream({ url, live: false, offset: "-1" })).json(),
    poll: await read("long-poll"),
    sse: await read("sse"),
    rest: await read("sse", "0000000000000003"),
    head: [head.status, Object.fromEntries(head.headers)],
    tail: await get("?offset=now"),
    wrong: (await get("?offset=0,1"))[0],
    twice: (await get("?offset=1&offset=2"))[0],
    beyond: (await get("?offset=99999"))[0],
    needs: (await get("?live=sse"))[0],
    written: (await fetch(url, { method: "POST", body: "x" })).status,
    unknown: (await fetch(`${base}/v1/stream/nobody`)).status,
  }),
);
