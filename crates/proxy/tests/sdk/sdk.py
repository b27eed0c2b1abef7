"""Real SDKs and curl through the proxy: the same answers as without it, streamed or not, errors and cancellation.
Then three programs of tenants before a provider that hides its limits.

usage: sdk.py TIDEGATE FOLDER VERSION; starts mocks and a proxy, and stops them at the end. FOLDER holds
sdk.mjs, and gets this version of the package openai for Node, which has no dependencies.
"""

import concurrent.futures
import io
import json
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request

import anthropic
import openai

TIDEGATE = sys.argv[1]
MESSAGES = [{"role": "user", "content": "hello"}]
programs = []


def start(*arguments, **environment):
    """Starts a program, and returns its address once it is ready."""
    line = [TIDEGATE, *arguments, "--listen", "127.0.0.1:0"]
    program = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
    programs.append(program)
    for line in program.stdout:
        if line.startswith("ready"):
            return line.split()[1]
    raise SystemExit(f"tidegate {arguments} ended before it was ready")


def get(url):
    with urllib.request.urlopen(url) as response:
        return json.load(response)


def node_package(folder, version):
    """Installs the package openai, unless this version is there."""
    place = folder / "node_modules" / "openai"
    marker = place / f"complete-{version}"
    if not marker.exists():
        url = f"https://registry.npmjs.org/openai/-/openai-{version}.tgz"
        with urllib.request.urlopen(url) as response:
            archive = tarfile.open(fileobj=io.BytesIO(response.read()))
        for member in archive.getmembers():
            member.name = member.name.removeprefix("package/")
        archive.extractall(place, filter="data")
        marker.touch()
    return folder


def plain(value):
    """Without ids and times."""
    if isinstance(value, dict):
        moving = {"id", "created", "created_at", "completed_at", "item_id", "_request_id"}
        return {key: plain(inner) for key, inner in value.items() if key not in moving}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def same(what, call, direct, through):
    """Compares the answers of two base URLs."""
    answers = []
    for base in (direct, through):
        answer = call(base)
        listed = answer if isinstance(answer, list) else [answer]
        answers.append([plain(item.model_dump(exclude_unset=True)) for item in listed])
    assert answers[0] == answers[1], f"{what}: {answers[0]} != {answers[1]}"
    assert answers[0], f"{what}: no answer"
    print("same:", what)


def openai_client(base, **options):
    return openai.OpenAI(api_key="sk-test", base_url=base + "/v1", **options)


def anthropic_client(base, **options):
    return anthropic.Anthropic(api_key="sk-test", base_url=base, **options)


def curl(url, body, *options):
    """The command line of one call with curl."""
    line = ["curl", "--silent", "--show-error", *options, url, "--header", "authorization: Bearer sk-test"]
    return [*line, "--json", json.dumps(body)]


def curl_events(base):
    """The events of a stream that curl receives."""
    line = curl(base + "/v1/chat/completions", {"model": "m", "messages": MESSAGES, "stream": True}, "--fail")
    lines = subprocess.check_output(line, text=True).splitlines()
    data = [line.removeprefix("data: ") for line in lines if line]
    return [event if event == "[DONE]" else plain(json.loads(event)) for event in data]


def curl_status(base, text):
    """The body and the status that curl receives."""
    line = curl(base + "/v1/responses", {"model": "m", "input": text}, "--write-out", "\n%{http_code}")
    body, status = subprocess.check_output(line, text=True).rsplit("\n", 1)
    return plain(json.loads(body)), status


def wait_until_idle(proxy, mock):
    """Waits until no call is in flight: its caller left, and the upstream noticed it."""
    before = time.monotonic()
    while any(scope["in_flight"] for scope in get(proxy + "/tidegate/scopes")["scopes"]):
        assert time.monotonic() - before < 60, "the call goes on without its caller"
        time.sleep(0.05)
    assert get(mock + "/mock/totals")["completed"] == 0, "the upstream went on without its caller"


def tenants():
    """Three tenants share a hidden limit: no 429, and the ledger has what the provider counted."""
    mock = start("mock", "openai", "--limit", "requests:20/s", "--hidden")
    with tempfile.TemporaryDirectory() as folder:
        store = ["--store", f"sqlite:{folder}/limits.db"]
        verb = lambda *line: json.loads(subprocess.check_output([TIDEGATE, *store, "--json", *line], text=True))
        names = ["ada", "bob", "cyd"]
        tokens = [verb("token", "create", name, "--scopes", "acquire")["secret"] for name in names]
        proxy = start("proxy", f"openai={mock}", "--key", "openai=env:A_KEY", *store, A_KEY="sk-real")

        def script(token):
            client = openai.OpenAI(api_key=token, base_url=proxy + "/openai/v1", max_retries=0)
            for _ in range(40):
                client.responses.create(model="m", input="hello")

        with concurrent.futures.ThreadPoolExecutor() as threads:
            list(threads.map(script, tokens))
        totals = get(mock + "/mock/totals")
        assert totals["completed"] == 120, totals
        # The last calls may be booked after their answers.
        for _ in range(600):
            lines = [verb("usage", "summary", "entity", name) for name in names]
            if json.dumps(lines).count('"output_tokens"') == 3:
                break
            time.sleep(0.1)
        print("tenants:", totals, lines)


def main():
    chat_mock, message_mock = start("mock", "openai"), start("mock", "anthropic")
    slow = ["--output-tokens", "60", "--event-interval", "1s"]
    slow_mock, slow_message_mock = start("mock", "openai", *slow), start("mock", "anthropic", *slow)
    small = ["--limit", "tokens:10/day"]
    small_mock, small_message_mock = start("mock", "openai", *small), start("mock", "anthropic", *small)
    proxy = start("proxy", f"openai={chat_mock}", f"anthropic={message_mock}", f"slow:openai={slow_mock}",
                  f"slow-messages:anthropic={slow_message_mock}", f"small:openai={small_mock}",
                  f"small-messages:anthropic={small_message_mock}")
    chat, message = (chat_mock, proxy + "/openai"), (message_mock, proxy + "/anthropic")

    create = lambda base: openai_client(base).chat.completions.create
    same("chat", lambda base: create(base)(model="m", messages=MESSAGES), *chat)
    same("chat, streamed", lambda base: list(create(base)(model="m", messages=MESSAGES, stream=True)), *chat)
    options = {"include_usage": True}
    same("chat, streamed with usage",
         lambda base: list(create(base)(model="m", messages=MESSAGES, stream=True, stream_options=options)), *chat)
    respond = lambda base: openai_client(base).responses.create
    same("responses", lambda base: respond(base)(model="m", input="hi"), *chat)
    same("responses, streamed", lambda base: list(respond(base)(model="m", input="hi", stream=True)), *chat)
    same("models", lambda base: list(openai_client(base).models.list()), *chat)
    write = lambda base: anthropic_client(base).messages.create
    same("messages", lambda base: write(base)(model="c", max_tokens=9, messages=MESSAGES), *message)
    same("messages, streamed",
         lambda base: list(write(base)(model="c", max_tokens=9, messages=MESSAGES, stream=True)), *message)

    for what, call in (("curl", lambda base: curl_status(base, "hi")), ("curl, streamed", curl_events)):
        direct, through = call(chat_mock), call(proxy + "/openai")
        assert direct == through, f"{what}: {direct} != {through}"
        print("same:", what)

    for base in (small_mock, proxy + "/small"):
        try:
            openai_client(base, max_retries=0).responses.create(model="m", input="x" * 100)
            raise SystemExit("a request that is too large was accepted")
        except openai.RateLimitError as error:
            assert "Request too large" in str(error), error
    errors = []
    for base in (small_message_mock, proxy + "/small-messages"):
        try:
            messages = [{"role": "user", "content": "x" * 100}]
            anthropic_client(base, max_retries=0).messages.create(model="c", max_tokens=9, messages=messages)
            raise SystemExit("a request that is too large was accepted")
        except anthropic.RateLimitError as error:
            errors.append(plain(error.body))
    assert errors[0] == errors[1], errors
    direct, through = (curl_status(base, "x" * 100) for base in (small_mock, proxy + "/small"))
    assert direct == through and direct[1] == "429", f"curl: {direct} != {through}"
    print("same: errors")

    stream = openai_client(proxy + "/slow").chat.completions.create(model="m", messages=MESSAGES, stream=True)
    next(iter(stream))
    stream.close()
    wait_until_idle(proxy, slow_mock)
    stream = anthropic_client(proxy + "/slow-messages").messages.create(
        model="c", max_tokens=60, messages=MESSAGES, stream=True)
    next(iter(stream))
    stream.close()
    wait_until_idle(proxy, slow_message_mock)
    body = {"model": "m", "messages": MESSAGES, "stream": True}
    line = curl(proxy + "/slow/v1/chat/completions", body, "--no-buffer")
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout.readline().startswith("data: ")
        program.terminate()
    wait_until_idle(proxy, slow_mock)
    print("cancelled: streams")

    folder = node_package(pathlib.Path(sys.argv[2]), sys.argv[3])
    bases = [chat_mock, proxy + "/openai", small_mock, proxy + "/small", proxy + "/slow"]
    subprocess.run(["node", "sdk.mjs", *bases], cwd=folder, check=True)
    wait_until_idle(proxy, slow_mock)
    tenants()


try:
    main()
finally:
    for program in programs:
        program.terminate()
        program.wait()
