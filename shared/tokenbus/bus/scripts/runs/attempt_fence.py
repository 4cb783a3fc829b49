"""Fences a run's raw frames: only the current attempt's one writer appends, and each frame once."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenbus.bus.scripts.script import MAX_VALUES, Arg, ScriptCall, script

_APPEND = script(
    "append",
    """
-- Append raw frames of several runs as one entry; each frame is checked.
-- KEYS: 1 raw (stream), 2 lease of the normalizer (hash), 3 and further: the runs' hashes, then the policy stage's
-- lease
-- if its lag is wanted.
-- ARGV: 1 and further: run, attempt, frame number, whether it is the last, frame and writer of each.
-- Reply: a verdict for each frame, the normalizer's lag, and the policy stage's.
-- Atomic: an attempt that was closed, or that another worker makes, writes nothing, and no frame is written twice.
local out, fields, writes, records, size, ends = {}, {}, {}, {}, 0, false
local n = (#ARGV) / 6
local policy = KEYS[n + 3]
for k = 0, n - 1 do
  local run, attempt, frame, final, data, writer = unpack(ARGV, k * 6 + 1, k * 6 + 6)
  local key = KEYS[3 + k]
  local h = redis.call('HMGET', key, 'status', 'attempt', 'raw', 'closed', 'writer', 'record')
  if not h[1] then out[k + 1] = 'gone'
  elseif h[1] ~= 'open' then out[k + 1] = h[1]
  elseif h[2] ~= attempt then out[k + 1] = 'attempt ' .. h[2]
  elseif frame ~= '-1' and tonumber(h[3]) == tonumber(frame) + 1 and h[5] == writer then out[k + 1] = 'already'
  elseif h[4] == attempt then out[k + 1] = 'closed'
  elseif frame ~= '-1' and h[3] ~= frame then out[k + 1] = 'frame ' .. h[3]
  elseif tonumber(frame) > 0 and h[5] ~= writer then out[k + 1] = 'writer ' .. (h[5] or '')
  else
    out[k + 1] = 'ok'
    ends = ends or final == '1'
    fields[#fields + 1] = run
    fields[#fields + 1] = data
    size = size + #data
    writes[#writes + 1] = {key, frame == '-1' and h[3] or h[3] + 1, final, attempt, frame == '0' and writer}
    if h[6] then
      local field = 'frame:' .. attempt .. ':' .. frame
      records[#records + 1] = {key, tonumber(h[6]) - #data, field, data}
    end
  end
end
-- A full server accepts what ends an attempt; all else is answered `full`. It can refuse the first write only.
if ends then redis.call('HDEL', KEYS[2], '') end
if size > 0 then
  for i = 1, #fields, MAX_VALUES do
    local added = redis.pcall('XADD', KEYS[1], '*', unpack(fields, i, math.min(i + MAX_VALUES - 1, #fields)))
    if type(added) == 'table' and added.err then
      if not string.find(added.err, 'OOM') then return added end
      for k = 1, n do if out[k] == 'ok' then out[k] = 'full' end end
      size = 0
      break
    end
  end
end
if size > 0 then
  for _, w in ipairs(writes) do
    if w[3] == '1' then redis.call('HSET', w[1], 'raw', w[2], 'closed', w[4])
    else redis.call('HSET', w[1], 'raw', w[2]) end
    if w[5] then redis.call('HSET', w[1], 'writer', w[5]) end
  end
  for _, r in ipairs(records) do
    redis.call('HSET', r[1], 'record', r[2])
    if r[2] >= 0 then redis.call('HSET', r[1], r[3], r[4]) end
  end
  redis.call('HINCRBY', KEYS[2], 'arrived', size)
end
local c = redis.call('HMGET', KEYS[2], 'arrived', 'done')
out[n + 1] = tonumber(c[1] or '0') - tonumber(c[2] or '0')
if policy then
  local p = redis.call('HMGET', policy, 'arrived', 'done')
  out[n + 2] = tonumber(p[1] or '0') - tonumber(p[2] or '0')
end
return out
""".replace("MAX_VALUES", str(MAX_VALUES)),
)


class RawPart(msgspec.Struct, frozen=True):
    """One run's part of a raw append: frame ``n`` (or ANY_FRAME), and whether it is the attempt's last."""

    run: str
    run_key: str
    attempt: int
    n: int
    final: bool
    data: bytes
    writer: str = ""
    """Unique name of the writer of the attempt's frames. Ignored for ANY_FRAME."""


def append_raw(
    raw: str, normalizer_lease: str, parts: Sequence[RawPart], *, policy_lease: str | None = None
) -> ScriptCall:
    """Write frames of several runs of one partition as one entry; each run is checked on its own.

    ``parts`` holds each run at most once. Reply, for each part: ``ok``, ``already`` (this frame is in; its reply was
    lost), ``full`` (the server has memory only for frames that end attempts: retry), or why it is refused (``gone``, a
    status, ``attempt N``, ``closed``, ``frame N``, ``writer W``). Then the normalizer's lag in bytes and, with
    ``policy_lease``, the policy stage's. The writer of frame 0 must write all frames of the attempt. If a server loses
    the fact that it handed out the attempt and gives it to a second worker, the frames of the two therefore never mix.

    A run whose hash has the field ``record`` is recorded: its frames are also kept in the hash as
    ``frame:<attempt>:<n>`` until the byte budget in that field is used up.
    """
    args: list[Arg] = []
    for p in parts:
        args += (p.run, p.attempt, p.n, 1 if p.final else 0, p.data, p.writer)
    keys = [raw, normalizer_lease, *(p.run_key for p in parts)]
    return ScriptCall(_APPEND, keys + ([policy_lease] if policy_lease else []), args)
