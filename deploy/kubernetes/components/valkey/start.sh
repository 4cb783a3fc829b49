#!/bin/sh
# Starts the server. The password comes from the environment and goes in by its configuration on stdin, so no list of processes
# shows it. What is secret is used if it is there: a certificate, and users with their rights.
set -eu
server=$(command -v valkey-server || command -v redis-server)
tls=${TLS:-/run/tls} users=${USERS:-/run/users}/users.acl port=${PORT:-6379}
if [ -f "$users" ] && ! grep -q '^user default ' "$users"; then
  echo "$users has no line for the user \`default\`: anybody could do anything as that user" >&2
  exit 1
fi
configuration() {
  # A full server must refuse writes, not drop them: noeviction, and a bound below the container's limit.
  cat <<END
dir ${DATA:-/data}
appendonly yes
appendfsync everysec
maxmemory ${MAXMEMORY:-2gb}
maxmemory-policy noeviction
proto-max-bulk-len 96mb
protected-mode no
END
  if [ -f "$tls/tls.crt" ]; then
    printf 'port 0\ntls-port %s\ntls-auth-clients no\n' "$port"
    printf 'tls-cert-file %s\ntls-key-file %s\ntls-ca-cert-file %s\n' "$tls/tls.crt" "$tls/tls.key" "$tls/ca.crt"
  else
    printf 'port %s\n' "$port"
  fi
  if [ -f "$users" ]; then
    printf 'aclfile %s\n' "$users" # with a user `default` of its own; the password below would be a second place for it
  elif [ -n "${PASSWORD:-}" ]; then
    printf 'requirepass "%s"\n' "$(printf %s "$PASSWORD" | sed 's/[\\"]/\\&/g')"
  fi
}
# Not through a pipe: the server must be the process that gets SIGTERM.
exec "$server" - <<EOF
$(configuration)
EOF
