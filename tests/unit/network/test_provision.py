"""The folders that `fedvit provision` writes: secrets stay where they are made, and every file is one that works."""

import shutil
import ssl
import stat
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedvit.cli.main import app
from fedvit.core.errors import UserError
from fedvit.core.settings import Experiment
from fedvit.network.flower import guard
from fedvit.network.flower.apps import read_app
from fedvit.network.flower.nodes import VARIABLE, pinned_names, read_nodes
from fedvit.network.policy import PolicyError, read_policy
from fedvit.network.provision.keys import certificate_fingerprint, read_public_key
from fedvit.network.provision.server import read_study
from tests.network.units import command_of, read_unit

EXPERIMENT = '[method]\nname = "fedper"\n[tune]\nname = "bias"\n[data]\nclass_names = "ill,well"\n'


def needs(command: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(command) is None, reason=f"needs {command}, which is not installed here")


def run(*words: object) -> Any:
    return CliRunner().invoke(app, ["provision", *map(str, words)])


def said(*words: object, status: int = 0) -> str:
    done = run(*words)
    assert done.exit_code == status, done.output
    return " ".join(done.output.split())


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A study of two sites, as the server writes it."""
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    (tmp_path / "images" / "ill").mkdir(parents=True)
    said(
        tmp_path / "experiment.toml", "--sites", "north,south", "--host", "fl.example.org", "--out", tmp_path / "lungs"
    )
    return tmp_path / "lungs"


def prepare(study: Path, name: str = "north") -> str:
    return said("--site", name, "--data", study.parent / "images", "--out", study / "sites" / name)


def mode(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def test_secrets_are_readable_by_their_owner_only_and_no_site_gets_one(study: Path) -> None:
    assert {file.name for file in study.rglob("*.key")} == {"ca.key", "server.key"}
    assert {mode(file) for file in study.rglob("*.key")} == {0o600}
    assert mode(study / "server") == 0o700
    sent = {file.name for file in (study / "sites" / "north").iterdir()}
    assert sent == {"README.md", "ca.crt", "policy.toml", "study.toml"}
    for file in (study / "sites").rglob("*"):
        assert not file.is_file() or "PRIVATE KEY" not in file.read_text()
    prepare(study)
    assert mode(study / "sites" / "north" / "north.key") == 0o600
    assert mode(study / "sites" / "north" / "state") == 0o700


def test_the_servers_certificate_is_valid_under_its_name_and_beside_itself(study: Path) -> None:
    """By OpenSSL's strict rules, which newer versions of Python apply."""
    server = study / "server"
    for name in ("fl.example.org", "localhost", "127.0.0.1"):
        trust = ssl.create_default_context(cafile=str(server / "ca.crt"))
        trust.verify_flags |= ssl.VERIFY_X509_STRICT
        assert handshake(trust, server, name)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(ssl.create_default_context(cafile=str(server / "ca.crt")), server, "other.example.org")


def handshake(trust: ssl.SSLContext, server: Path, name: str) -> bool:
    """Shake hands in memory."""
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.load_cert_chain(server / "server.crt", server / "server.key")
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trust.wrap_bio(back, there, server_hostname=name)
    other = own.wrap_bio(there, back, server_side=True)
    for side in (client, other, client, other):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return client.version() is not None


def test_the_fingerprint_of_the_authority_is_the_one_that_openssl_prints(study: Path) -> None:
    told = prepare(study)
    certificate, public = study / "server" / "ca.crt", study / "sites" / "north" / "north.pub"
    words = ["openssl", "x509", "-noout", "-fingerprint", "-sha256", "-in", str(certificate)]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert certificate_fingerprint(certificate) in printed
    assert certificate_fingerprint(certificate) in told
    assert certificate_fingerprint(certificate) in (study / "server" / "README.md").read_text()
    assert read_public_key(public)[2] in told


@needs("ssh-keygen")
def test_the_fingerprint_of_a_key_is_the_one_that_ssh_prints(study: Path) -> None:
    prepare(study)
    public = study / "sites" / "north" / "north.pub"
    printed = subprocess.run(["ssh-keygen", "-lf", public], capture_output=True, text=True, check=True).stdout
    assert read_public_key(public)[2] in printed


def test_a_site_that_prepares_again_keeps_its_key_and_its_settings(study: Path) -> None:
    prepare(study)
    folder = study / "sites" / "north"
    key = (folder / "north.key").read_bytes()
    (folder / "node.toml").write_text("threads = 4\n")
    prepare(study)
    assert (folder / "north.key").read_bytes() == key
    told = tomllib.loads((folder / "node.toml").read_text())
    assert (told["threads"], told["site"], told["data"]) == (4, "north", str(study.parent / "images"))


def test_the_policy_allows_the_run_that_was_set_up_and_no_other(study: Path) -> None:
    file = study / "sites" / "north" / "policy.toml"
    experiment, federation = read_app(study / "server" / "app" / "fedvit_app")
    agreed, policy = federation.hash_with(experiment), read_policy(file)
    policy.allow(experiment, agreed)
    policy.allow(changed(experiment, "method", {"name": "local"}), agreed)
    for other in (
        changed(experiment, "method", {"name": "fedavg"}),
        changed(experiment, "train", experiment.train.model_copy(update={"rounds": experiment.train.rounds + 1})),
        changed(experiment, "train", experiment.train.model_copy(update={"batch": 8})),
        changed(experiment, "data", experiment.data.model_copy(update={"test": 0.5})),
    ):
        with pytest.raises(PolicyError):
            policy.allow(other, agreed)
    file.write_text(file.read_text().replace("# settings_sha256", "settings_sha256"))
    read_policy(file).allow(experiment, agreed)
    with pytest.raises(PolicyError, match="SHA-256"):
        read_policy(file).allow(experiment, "0" * 64)


def changed(experiment: Experiment, table: str, content: Any) -> Experiment:
    return experiment.model_copy(update={table: content})


def test_the_gate_knows_every_signed_path_and_no_other(study: Path) -> None:
    text = (study / "server" / "gate" / "nginx.conf").read_text()
    assert text.count("proxy_pass") == len(guard.SIGNED)
    for path in guard.SIGNED:
        assert f"location = {path} {{" in text


@needs("nginx")
def test_nginx_takes_its_configuration(study: Path) -> None:
    words = ["nginx", "-t", "-p", f"{study}/server/gate/", "-c", "nginx.conf"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_services_are_complete_and_guarded(study: Path) -> None:
    prepare(study)
    units = sorted(study.rglob("*.service"))
    assert [unit.name for unit in units] == [
        "fedvit-lungs-gate.service", "fedvit-lungs-superlink.service", "fedvit-lungs-north.service",
    ]  # fmt: skip
    for unit in units:
        keys = [key for key, _ in read_unit(unit)]
        assert {"User", "ExecStart", "Restart", "NoNewPrivileges", "ProtectSystem"} <= set(keys)
        assert unit.name == "fedvit-lungs-gate.service" or guard.__name__ in command_of(unit)


@needs("systemd-analyze")
def test_systemd_takes_the_services(study: Path) -> None:
    prepare(study)
    for unit in sorted(study.rglob("*.service")):
        words = ["systemd-analyze", "verify", "--man=no", str(unit)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        complaints = [line for line in (done.stdout + done.stderr).splitlines() if unit.name in line]
        assert all("nginx is not executable" in line for line in complaints), complaints  # where it is not installed


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--sites", "north,south"], "expected --sites NAME,NAME and --host HOST"),
        (["--sites", "north,../south", "--host", "h"], "expected a site named with letters"),
        (["--sites", "north,south", "--host", "h; return 200"], "--host expects the name or IP address"),
        (["--sites", "north,south", "--host", "h", "--out", "a b"], "the folder names the study"),
        (["--sites", "north,south", "--host", "h", "--out", "a b/c"], "a service cannot use the folder"),
        (["--sites", "north,south", "--host", "h", "--set", "method.name=fedv"], "use fedvit split-server"),
        (["--sites", "north", "--host", "h"], "at least two sites"),
        (["--sites", "north,south", "--host", "h", "--site", "north"], "expected one of three"),
    ],
)
def test_what_cannot_be_set_up_is_said_before_anything_is_written(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    assert told in said("experiment.toml", *words, status=2)
    assert [file.name for file in tmp_path.iterdir()] == ["experiment.toml"]


def test_a_study_is_not_written_over_another(study: Path) -> None:
    words = ("--sites", "north,south", "--host", "h", "--out", study)
    assert "a study's keys are made once" in said(study.parent / "experiment.toml", *words, status=2)


def test_a_server_may_have_an_ip_address_of_either_kind(tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    for number, host in enumerate(("192.0.2.7", "2001:db8::7")):
        out = tmp_path / f"study{number}"
        said(tmp_path / "experiment.toml", "--sites", "north,south", "--host", host, "--out", out)
        assert handshake(ssl.create_default_context(cafile=str(out / "server" / "ca.crt")), out / "server", host)
    assert read_study(out / "sites" / "north").address == "[2001:db8::7]:8443"


def test_a_site_is_told_what_is_missing(study: Path, tmp_path: Path) -> None:
    folder, images = study / "sites" / "north", tmp_path / "images"
    assert "--data expects the site's images" in said("--site", "north", "--out", folder, status=2)
    assert "the sites of the study lungs" in said("--site", "east", "--data", images, "--out", folder, status=2)
    assert "is not a folder that" in said("--site", "north", "--data", images, "--out", tmp_path, status=2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no key",
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGJ5dGVzYnl0ZXNieXRlc2J5dGVzYnl0ZXNieXRlc2I= north",
        "\0" * 9999,
    ],
)
def test_what_is_no_public_key_of_a_site_is_refused(text: str, study: Path, tmp_path: Path) -> None:
    (tmp_path / "north.pub").write_text(text)
    told = said("--register", tmp_path / "north.pub", "--out", study / "server", status=2)
    assert "is not the public key of a site" in told or "on the curve P-384" in told


def test_a_key_of_a_site_that_is_not_in_the_study_is_refused(study: Path) -> None:
    prepare(study)
    public = study / "sites" / "north" / "north.pub"
    public.write_text(public.read_text().replace("north", "east"))
    assert "is the key of 'east', but the sites are north, south" in said(
        "--register", public, "--out", study / "server", status=2
    )


def test_registering_without_a_superlink_says_what_to_start(study: Path) -> None:
    prepare(study)
    told = said("--register", study / "sites" / "north" / "north.pub", "--out", study / "server", status=2)
    assert "Is its service running" in told
    assert read_nodes(study / "server" / "nodes.json") == {}


def test_a_list_of_sites_that_cannot_be_read_lets_nobody_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert pinned_names() is None
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nodes.json"))
    with pytest.raises(UserError, match="is not the list of sites"):
        pinned_names()
    (tmp_path / "nodes.json").write_text('{"north": {"node": 7, "key": "k"}}')
    assert pinned_names() == {7: "north"}
    for text in ("[]", "{", '{"north": 7}', '{"north": {"node": "x", "key": ""}}'):
        (tmp_path / "nodes.json").write_text(text)
        with pytest.raises(UserError, match="is not the list of sites"):
            pinned_names()
