-- Run `one`, a script as a function, for each call: its numbers of keys and arguments, then its arguments. Both must be
-- within what came: nobody who may run a script may make it run long.
local replies, n, k, a = {}, 0, 0, 1
while ARGV[a] do
  local keys, args, ks, as = {}, {}, tonumber(ARGV[a]), tonumber(ARGV[a + 1])
  if not (ks and as and ks >= 0 and ks <= #KEYS - k and as >= 0 and as <= #ARGV - a - 1) then
    return redis.error_reply('ERR no call at argument ' .. a)
  end
  for i = 1, ks do keys[i] = KEYS[k + i] end
  for i = 1, as do args[i] = ARGV[a + 1 + i] end
  local ok, reply = pcall(one, keys, args)
  -- An error is a table from Redis 7 on, and before that a text.
  if not ok and type(reply) ~= 'table' then reply = {err = tostring(reply)} end
  n, k, a = n + 1, k + ks, a + 2 + as
  replies[n] = reply or false
end
return replies
