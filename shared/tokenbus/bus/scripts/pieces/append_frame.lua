-- Append a run's frame to a stage's input, and count its bytes as arrived there.
local function append_frame(stream, lease, run, frame)
  redis.call('XADD', stream, '*', run, frame)
  redis.call('HINCRBY', lease, 'arrived', #frame)
end
