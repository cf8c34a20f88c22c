#!/bin/sh
# Tests an image from inside, as its user: the version, doctor, and a request to a server. Not part of the image.
set -eu
[ "$(id -u)" != 0 ] || { echo "try.sh: this is root" >&2; exit 1; }
if touch /opt/octavo/x 2>/dev/null; then echo "try.sh: the program can be overwritten by its user" >&2; exit 1; fi
octavo --version
octavo doctor
octavo serve >/tmp/serve.log 2>&1 &
server=$!
python3 - <<'END' || { cat /tmp/serve.log >&2; kill $server; exit 1; }
import json, os, time, urllib.error, urllib.request
request = urllib.request.Request(
    f"http://127.0.0.1:{os.environ.get('OCTAVO_PORT', '8000')}/v1/completions",
    json.dumps({"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}).encode(),
    {"Content-Type": "application/json"},
)
for _ in range(240):
    try:
        answer = json.load(urllib.request.urlopen(request, timeout=60))
        break
    except (urllib.error.URLError, ConnectionError):
        time.sleep(0.5)
text = answer["choices"][0]["text"]
print("the server completes:", text)
assert "Paris" in text, text
END
grep -o 'native CPU kernels.*' /tmp/serve.log
kill -TERM $server
wait $server && echo "stopped with 0"
