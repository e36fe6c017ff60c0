"""What the sessions share: steps that run at once, and servers that live while a session talks to them."""

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

KEY = "secret"

passed = []


def check(name):
    """Registers a step and runs it at once."""

    def run(step):
        step()
        passed.append(name)
        print(f"  ok  {name}", flush=True)
        return step

    return run


def serve(command, drive):
    """Runs a server, whose port is put in place of PORT, while `drive` talks to it; it must end by itself when told to."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    process, log = start([str(port) if word == "PORT" else word for word in command], port)
    base = f"http://127.0.0.1:{port}"
    try:
        drive(base, log)
        request = urllib.request.Request(f"{base}/shutdown", method="POST", headers={"Authorization": f"Bearer {KEY}"})
        urllib.request.urlopen(request, timeout=30).read()
        assert process.wait(timeout=30) == 0, process.returncode
        passed.append("shutdown ends the process with 0")
    except BaseException:
        process.kill()
        log.seek(0)
        sys.stderr.write(log.read()[-4000:])
        raise


def start(command, port):
    log = tempfile.NamedTemporaryFile("w+", suffix=".log")
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    deadline = time.time() + 120
    while time.time() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
                if answer.status == 200:
                    return process, log
        except OSError:
            time.sleep(0.1)
    log.seek(0)
    sys.exit("the server did not become ready:\n" + log.read())


def get(base, path):
    request = urllib.request.Request(base + path, headers={"X-Api-Key": KEY})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def refused(error, word, call):
    """Checks that a call is refused with a client's error whose text has a word."""
    try:
        call()
    except error as e:
        assert word in str(e), (word, e)
        return e
    raise AssertionError(f"accepted, but `{word}` should have been refused")
