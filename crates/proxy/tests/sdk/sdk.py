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


def curl(base):
    """One call with curl."""
    line = ["curl", "--silent", "--show-error", "--fail", base + "/v1/responses", "--header", "authorization: Bearer sk-test"]
    body = json.dumps({"model": "m", "input": "hi"})
    output = subprocess.run([*line, "--json", body], stdout=subprocess.PIPE, check=True, text=True)
    return plain(json.loads(output.stdout))


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
    slow_mock = start("mock", "openai", "--output-tokens", "60", "--event-interval", "100ms")
    small_mock = start("mock", "openai", "--limit", "tokens:10/day")
    proxy = start("proxy", f"openai={chat_mock}", f"anthropic={message_mock}", f"slow:openai={slow_mock}",
                  f"small:openai={small_mock}")
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

    direct, through = curl(chat_mock), curl(proxy + "/openai")
    assert direct == through, f"curl: {direct} != {through}"
    print("same: curl")

    for base in (small_mock, proxy + "/small"):
        try:
            openai_client(base, max_retries=0).responses.create(model="m", input="x" * 100)
            raise SystemExit("a request that is too large was accepted")
        except openai.RateLimitError as error:
            assert "Request too large" in str(error), error
    print("same: an error")

    before = time.monotonic()
    stream = openai_client(proxy + "/slow").chat.completions.create(model="m", messages=MESSAGES, stream=True)
    next(iter(stream))
    stream.close()
    while any(scope["in_flight"] for scope in get(proxy + "/tidegate/scopes")["scopes"]):
        assert time.monotonic() - before < 60, "the call goes on without its caller"
        time.sleep(0.05)
    assert get(slow_mock + "/mock/totals")["completed"] == 0, "the upstream went on without its caller"
    print("cancelled: a stream")

    folder = node_package(pathlib.Path(sys.argv[2]), sys.argv[3])
    subprocess.run(["node", "sdk.mjs", chat_mock, proxy + "/openai"], cwd=folder, check=True)
    tenants()


try:
    main()
finally:
    for program in programs:
        program.terminate()
        program.wait()
