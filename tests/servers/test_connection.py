"""How a server is reached: what is read from where, what is refused, and that no secret is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from servers.command import parse_command
from servers.connection import HIDDEN, Connection, Tls, masked, read_connection
from servers.errors import OptionError

SECRET = "s3cret-of-this-test"


def test_secrets_come_from_files_or_the_environment(tmp_path: Path) -> None:
    token, password = tmp_path / "token", tmp_path / "password"
    token.write_text(f"{SECRET}\n")
    password.write_text(f"{SECRET}\n")
    assert read_connection({}, api_key_file=token).api_key == SECRET
    assert read_connection({"VTUNE_TOKEN": SECRET}).api_key == SECRET
    assert read_connection({"VTUNE_TOKEN": "other"}, api_key_file=token).api_key == SECRET
    assert read_connection({}, user="u", password_file=password).password == SECRET
    own = read_connection({"VTUNE_PASSWORD": SECRET, "VTUNE_TOKEN": "other"}, user="u")
    assert (own.user, own.password, own.api_key) == ("u", SECRET, None)
    assert read_connection({}) == Connection()
    assert SECRET not in repr(own)
    assert SECRET not in repr(read_connection({}, api_key_file=token))


def test_credentials_of_no_use_are_refused_in_words(tmp_path: Path) -> None:
    token, empty, two = tmp_path / "token", tmp_path / "empty", tmp_path / "two"
    token.write_text(SECRET)
    empty.write_text("\n")
    two.write_text(f"{SECRET}\n{SECRET}\n")
    complaints: list[tuple[str, dict[str, Any]]] = [
        ("two ways to log in", {"api_key_file": token, "user": "u", "password_file": token}),
        ("--password-file is whose", {"password_file": token}),
        (r"--user u: no password; give --password-file, or set VTUNE_PASSWORD", {"user": "u"}),
        (r"--api-key-file .*gone: cannot be read", {"api_key_file": tmp_path / "gone"}),
        (r"--api-key-file .*empty: must hold one line", {"api_key_file": empty}),
        (r"--api-key-file .*two: must hold one line", {"api_key_file": two}),
        ("--api-key and --api-key-file are two keys", {"api_key": SECRET, "api_key_file": token}),
        ("API key: holds a character", {"api_key": f"{SECRET}\n"}),
        ("API key: holds a character", {"api_key": f"{SECRET}\u2026"}),
        ("--header X-Key: holds a character", {"headers": [f"X-Key: {SECRET}\u2026"]}),
        ("--header: write 'Name: value'", {"headers": [SECRET]}),
        ("--header Content-Length: is set by each request", {"headers": [f"Content-Length: {SECRET}"]}),
        ("--header Authorization and a key", {"api_key": "x", "headers": [f"Authorization: {SECRET}"]}),
    ]
    for complaint, given in complaints:
        with pytest.raises(OptionError, match=complaint) as refused:
            read_connection({}, **given)
        assert SECRET not in str(refused.value)


def test_certificates_of_no_use_are_refused_in_words(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("no certificate")
    with pytest.raises(OptionError, match="--ca-file names the certificates to trust, --insecure"):
        Tls(text, verify=False)
    with pytest.raises(OptionError, match=r"--ca-file .*gone: no such file"):
        Tls(tmp_path / "gone")
    with pytest.raises(OptionError, match="--client-key needs --client-cert"):
        Tls(key_file=text)
    with pytest.raises(OptionError, match=r"--ca-file .*text: no certificates in PEM form"):
        Tls(text).context()
    with pytest.raises(OptionError, match=r"--client-cert .*text: not a PEM certificate"):
        Tls(cert_file=text).context()


def test_headers_of_options_win_over_those_of_the_environment() -> None:
    environment = {"VTUNE_HEADERS": "X-Team: search\nX-Key: old"}
    connection = read_connection(environment, api_key="k", headers=["x-key:  new "])
    assert connection.sent() == {"X-Team": "search", "x-key": "new", "Authorization": "Bearer k"}


def test_a_child_of_ours_reads_the_same_and_has_no_secret_on_its_command_line() -> None:
    connection = Connection(api_key=SECRET, headers=(("X-Key", SECRET),), timeout=3.0)
    assert read_connection(connection.environment(), timeout=3.0) == connection
    assert connection.words() == ["--connect-timeout", "3s"]
    login = Connection(user="u", password=SECRET, tls=Tls(verify=False))
    assert read_connection(login.environment(), user="u", tls=Tls(verify=False)) == login
    assert login.words() == ["--user", "u", "--insecure"]


def test_what_a_server_repeats_is_hidden() -> None:
    connection = Connection(user="u", password=SECRET, headers=(("X-Key", f"h-{SECRET}"), ("X-Team", "a")))
    said = f"{connection.authorization} {SECRET} h-{SECRET} a"
    assert connection.hide(said) == f"Basic {HIDDEN} {HIDDEN} h-{HIDDEN} a"


@pytest.mark.parametrize(
    "command",
    [
        f"vllm serve M --api-key {SECRET} --seed 1",
        f"vllm serve M --api_key='{SECRET} x' --seed 1",
        f"VLLM_API_KEY={SECRET} vllm serve M --seed 1",
        f"lmdeploy serve api_server M --api-keys a-{SECRET} {SECRET} --seed 1",
        f"HF_TOKEN='{SECRET} x' vllm serve M --seed 1",
    ],
)
def test_a_command_is_shown_without_its_key(command: str) -> None:
    assert SECRET not in masked(command)
    assert HIDDEN in masked(command)
    assert masked(command).endswith(" --seed 1")
    assert masked("vllm serve M --max-num-seqs 8") == "vllm serve M --max-num-seqs 8"


@pytest.mark.parametrize(
    "text",
    [
        f"vllm serve M --api-key {SECRET}",
        f"VLLM_API_KEY={SECRET} vllm serve M",
        f"lmdeploy serve api_server M --api-keys {SECRET}",
        f"python -m sglang.launch_server --model-path M --api-key {SECRET}",
        f"--api-key {SECRET}",
    ],
)
def test_a_key_is_taken_out_of_a_command(text: str) -> None:
    command, key = parse_command(text).without_key()
    assert key == SECRET
    assert SECRET not in repr(command)
    assert command.without_key() == (command, None)
