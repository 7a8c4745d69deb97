"""Run an application: start Ray and Serve, wait for the arms, and leave nothing behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import httpx

from carryover.errors import ServingError
from carryover.serving.cluster import check_resources, connected, quietly, serve_started
from carryover.serving.config import ServeConfig, check_drafters, check_target
from carryover.serving.keys import ADMIN_KEY_FILE, make_admin_key
from carryover.targets import resolve

if TYPE_CHECKING:
    from carryover.serving.startup import Report

READY_TIMEOUT_S = 60.0
_HEALTH_POLL_S = 2.0


@dataclass(frozen=True)
class Endpoint:
    """A running application.

    Attributes:
        url: base URL, without `/v1`.
        model: the model name for clients that do not choose an arm.
        arms: names of the arms, which are model ids too; the first is the control arm.
        metrics_url: Prometheus page with vLLM's counters; None if not known.
        admin_key_file: holds the key for `/admin/traffic`.
    """

    url: str
    model: str
    arms: tuple[str, ...]
    metrics_url: str | None
    admin_key_file: Path


@contextmanager
def running(
    config: ServeConfig, *, address: str | None = None, report: Report | None = None
) -> Iterator[Endpoint]:
    """Serve the application inside the `with` block, and stop all that was started at its end.

    Args:
        config: of the application.
        address: of a Ray cluster to deploy on; None uses the one that this process is connected
            to, else starts one on this machine for as long as the block runs.
        report: called about twice a second during the start with a list of `ArmState`.

    Raises:
        ConfigError: the configuration, a drafter, or the port cannot be used.
        TargetError: the target cannot be had.
        ServingError: an arm did not start (gives the engine's own error), or the admin key cannot
            be written.
    """
    config = check_drafters(config)
    target = resolve(config.target)
    check_target(config, target)
    with connected(config, address) as ours, serve_started(config, ours=ours) as http:
        from ray import serve

        from carryover.serving.application import build_application
        from carryover.serving.startup import wait_until_running

        check_resources(config)
        config, key_file = with_admin_key(config)
        application = build_application(config, target=target)
        answering = False
        try:
            serve.run_many(
                [serve.RunTarget(application, name=config.name)],
                wait_for_ingress_deployment_creation=False,
                wait_for_applications_running=False,
            )
            wait_until_running(config, report=report)
            url = f"http://{_client_host(http.host)}:{http.port}"
            _wait_for_answer(url)
            answering = True
            yield Endpoint(
                url, config.model, tuple(arm.name for arm in config.arms), _metrics_url(),
                key_file,
            )  # fmt: skip
        finally:
            # Replicas that are still starting would be waited for; a cluster of ours just ends.
            if answering or not ours:
                quietly("deleting the application", serve.delete, config.name)


def with_admin_key(config: ServeConfig) -> tuple[ServeConfig, Path]:
    """Make a key for changing the split, known to this machine's user alone.

    Returns:
        The configuration with the key's hash, and the file with the key.

    Raises:
        ServingError: the file cannot be written.
    """
    folder = config.traffic.resolve(
        arms=[arm.name for arm in config.arms], application=config.name
    ).state
    security = config.security
    admins = [*security.admin_keys, make_admin_key(folder)]
    security = security.model_copy(update={"admin_keys": admins})
    return config.model_copy(update={"security": security}), folder / ADMIN_KEY_FILE


def watch_health(name: str, *, tell: Callable[[str], object]) -> NoReturn:
    """Tell when an arm fails or recovers, which Ray Serve sees to by itself; never returns.

    Args:
        name: of the application.
        tell: called with one line per change.

    Raises:
        ServingError: the application or its cluster is gone.
    """
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    known: dict[str, str] = {}
    while True:
        time.sleep(_HEALTH_POLL_S)
        try:
            application = serve.status().applications.get(name)
        except (RayError, RayServeException) as error:
            raise ServingError(f"the Ray cluster is gone: {error}; start again") from None
        if application is None:
            raise ServingError(f"the application {name!r} was deleted from the cluster")
        for deployment, overview in application.deployments.items():
            status = overview.status.value
            if known.setdefault(deployment, status) != status:
                known[deployment] = status
                arm = deployment.rpartition(":")[2]
                tell(f"{arm}: {status.lower()} {overview.message.strip()[:300]}".strip())


def _client_host(host: str) -> str:
    if host in ("0.0.0.0", "::", ""):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _wait_for_answer(url: str) -> None:
    """Wait until the proxy routes to the application."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    problem = "no answer"
    while time.monotonic() < deadline:
        try:
            answer = httpx.get(f"{url}/v1/models", timeout=5.0)
            # 401: it answers, and wants a key.
            if answer.status_code in (200, 401):
                return
            problem = f"status {answer.status_code}"
        except httpx.HTTPError as error:
            problem = str(error) or type(error).__name__
        time.sleep(0.2)
    raise ServingError(
        f"the arms are ready, but {url}/v1/models does not answer ({problem}); if Serve was "
        "already running on this cluster, it listens where it was first told to"
    )


def _metrics_url() -> str | None:
    """The metrics page of the node that this process runs on."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        if node["NodeID"] == here and node.get("MetricsExportPort"):
            return f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    return None
