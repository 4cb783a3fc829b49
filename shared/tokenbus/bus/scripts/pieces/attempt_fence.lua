-- The fence of a run's raw frames: only the one writer of the current attempt appends, and each frame once.
-- A frame of number -1 is not part of the sequence: it only ends the attempt.
local function check_frame(run_key, attempt, n, writer)
  -- 'ok' and what `count_frame` needs, or why the frame is refused.
  local h = redis.call('HMGET', run_key, 'status', 'attempt', 'raw', 'closed', 'writer', 'record', 'job')
  local status, present, frames, closed, wrote = h[1], h[2], h[3], h[4], h[5]
  if not status then return 'gone' end
  if status ~= 'open' then return status end
  if present ~= attempt then return 'attempt ' .. present end
  if n ~= '-1' and tonumber(frames) == tonumber(n) + 1 and wrote == writer then return 'already' end
  if closed == attempt then return 'closed' end
  if h[7] and n ~= '-1' and tonumber(frames) > 0 and wrote ~= writer then return 'taken' end
  if n ~= '-1' and frames ~= n then return 'frame ' .. frames end
  if tonumber(n) > 0 and wrote ~= writer then return 'writer ' .. (wrote or '') end
  return 'ok', {run_key = run_key, attempt = attempt, n = n, writer = writer, frames = frames, record = h[6]}
end
local function count_frame(checked, final, data, job)
  -- After the frame was appended. `job`: how far the frame brings the provider's job, or ''.
  -- A recorded run keeps it too, until the budget in `record` is used up.
  local set = {checked.run_key, 'raw', checked.n == '-1' and checked.frames or checked.frames + 1}
  local function field(name, value) set[#set + 1], set[#set + 2] = name, value end
  if final == '1' then field('closed', checked.attempt) end
  if checked.n == '0' then field('writer', checked.writer) end
  if job ~= '' then field('job', job) field('job_taken', 0) end
  if checked.record then
    local left = tonumber(checked.record) - #data
    field('record', left)
    if left >= 0 then field('frame:' .. checked.attempt .. ':' .. checked.n, data) end
  end
  redis.call('HSET', unpack(set))
end
