"""Container files and manifests agree with the package: versions, paths, commands, settings."""

import ast
import re
import shlex
import subprocess
import tomllib

import pytest
import yaml
from command_lines import check_command_line

from carryover.errors import UserError

MANIFESTS = ("rayservice", "rayjob", "mlflow", "storage")


@pytest.fixture(scope="module")
def infra(repository):
    return repository / "infra"


@pytest.fixture(scope="module")
def documents(infra):
    return {
        (document["kind"], document["metadata"]["name"]): document
        for name in MANIFESTS
        for document in yaml.safe_load_all((infra / "kuberay" / f"{name}.yaml").read_text())
    }


@pytest.fixture(scope="module")
def ray_clusters(documents):
    return {
        "service": documents["RayService", "carryover"]["spec"]["rayClusterConfig"],
        "job": documents["RayJob", "carryover-data"]["spec"]["rayClusterSpec"],
    }


def pinned(repository, name):
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    pins = [re.split(r"==", text) for text in project["dependencies"]]
    return next(
        version for package, *rest in pins if rest and package.startswith(name) for version in rest
    )


def pods(document):
    """Every pod specification in a document, at whatever depth."""
    if isinstance(document, dict):
        if "containers" in document:
            yield document
        for value in document.values():
            yield from pods(value)
    elif isinstance(document, list):
        for value in document:
            yield from pods(value)


@pytest.mark.parametrize("flavour", ["cpu", "gpu"])
def test_a_container_file_copies_what_the_package_needs(infra, repository, flavour):
    lines = (infra / f"Dockerfile.{flavour}").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    version = dict(steps)["FROM"].partition(":")[2].partition("-")[0]
    assert version in ("3.11", "3.12")
    copied = [name for word, rest in steps if word == "COPY" for name in rest.split()[:-1]]
    assert all((repository / name).exists() for name in copied)
    assert {
        "pyproject.toml",
        "LICENSE",
        "README.md",
        "platform",
        "jobs",
        "serve_apps",
        "sweeps",
    } <= set(copied)
    assert f"infra/setup.sh {flavour}" in "\n".join(lines)
    assert dict(steps)["USER"] != "root"
    assert dict(steps)["ENTRYPOINT"] == '["platform"]'
    allowed = (infra / f"Dockerfile.{flavour}.dockerignore").read_text().split()
    for name in copied:
        assert f"!{name}" in allowed or (name.startswith("infra/") and "!infra/*.sh" in allowed)


def test_compose_services_run_commands_that_exist(infra):
    services = yaml.safe_load((infra / "compose.yaml").read_text())["services"]
    check_command_line(["platform", *services["serve"]["command"]])
    for service in services.values():
        assert (infra / ".." / service["build"]["dockerfile"]).resolve().exists()
        for published in service.get("ports", []):
            assert published.startswith("127.0.0.1:"), "published on loopback alone"
    entry = services["mlflow"]["entrypoint"][0].removeprefix("/opt/carryover/")
    assert (infra.parent / entry).exists()
    tracking = services["platform"]["environment"]["MLFLOW_TRACKING_URI"]
    assert (
        tracking.removeprefix("http://")
        in services["mlflow"]["environment"]["MLFLOW_SERVER_ALLOWED_HOSTS"]
    )


def test_every_cluster_runs_the_ray_that_the_images_hold(ray_clusters, repository):
    for cluster in ray_clusters.values():
        assert cluster["rayVersion"] == pinned(repository, "ray")
        assert cluster["workerGroupSpecs"][0]["replicas"] >= 1


def test_images_volumes_and_claims_exist(documents):
    claims = {name for kind, name in documents if kind == "PersistentVolumeClaim"}
    for document in documents.values():
        for pod in pods(document):
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            for volume in volumes.values():
                if "persistentVolumeClaim" in volume:
                    assert volume["persistentVolumeClaim"]["claimName"] in claims
            for container in pod["containers"]:
                assert container["image"] in ("carryover:cpu", "carryover:gpu")
                assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys()
                assert container["resources"]["limits"]["memory"]
            assert pod["securityContext"]["runAsUser"] == 1000


def test_the_tracking_server_is_reached_under_an_allowed_name(documents):
    (pod,) = pods(documents["Deployment", "mlflow"])
    environment = {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]}
    assert ("Service", "mlflow") in documents
    for document in documents.values():
        for each in pods(document):
            for entry in each["containers"][0].get("env", []):
                if entry["name"] == "MLFLOW_TRACKING_URI":
                    host = entry["value"].removeprefix("http://")
                    assert host in environment["MLFLOW_SERVER_ALLOWED_HOSTS"].split(",")


def test_the_service_builds_an_application_that_its_config_class_accepts(documents, repository):
    from carryover.serving.config import ServeConfig

    config = yaml.safe_load(documents["RayService", "carryover"]["spec"]["serveConfigV2"])
    (application,) = config["applications"]
    module, _, function = application["import_path"].partition(":")
    tree = ast.parse((repository / f"{module.replace('.', '/')}.py").read_text())
    assert function in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    parsed = ServeConfig.parse(application["args"])
    replicas = documents["RayService", "carryover"]["spec"]["rayClusterConfig"]["workerGroupSpecs"][
        0
    ]
    assert len(parsed.arms) * parsed.resources.replicas <= replicas["replicas"], "one GPU an arm"
    with pytest.raises(UserError, match="did you mean"):
        ServeConfig.parse({**application["args"], "targett": "x"})


def test_the_job_runs_a_command_that_exists(documents, repository):
    spec = documents["RayJob", "carryover-data"]["spec"]
    check_command_line(shlex.split(spec["entrypoint"]), repository)
    engines = int(re.search(r"pool\.engines=(\d+)", spec["entrypoint"])[1])
    assert engines == spec["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"]
    # the head must not take the command, which asks its own machine for a GPU
    assert spec["entrypointNumCpus"] >= 1
    assert spec["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


@pytest.mark.parametrize(
    "line", ["platform tarin", "platform doctor --jsno", "platform data inspect", "platform --no"]
)
def test_the_check_of_command_lines_checks(line):
    with pytest.raises(Exception, match=r"no command|no option|No such option|Missing parameter"):
        check_command_line(line.split())


@pytest.mark.parametrize("script", ["setup.sh", "start_ray.sh", "start_mlflow.sh"])
def test_scripts_explain_themselves(infra, script):
    done = subprocess.run([infra / script, "--help"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0
    assert script.removesuffix(".sh").split("_")[-1] in done.stdout.lower()
    assert "#" not in done.stdout


@pytest.mark.parametrize("arguments", [[], ["worker"], ["tail"]])
def test_a_wrong_role_is_refused(infra, arguments):
    done = subprocess.run(
        [infra / "start_ray.sh", *arguments], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2
    assert "worker" in done.stderr
