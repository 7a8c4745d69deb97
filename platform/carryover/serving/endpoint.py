"""Run an application: start Ray and Serve, wait for the arms, and leave nothing behind."""

from __future__ import annotations

import importlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, NoReturn

import httpx
import psutil

from carryover.engine import quiet_vllm
from carryover.errors import ConfigError, ServingError
from carryover.guardian import end_processes
from carryover.serving.config import Http, ServeConfig, check_drafters, check_target
from carryover.serving.preload import without_gc
from carryover.targets import resolve

if TYPE_CHECKING:
    from carryover.serving.startup import Report

READY_TIMEOUT_S = 60.0
# Ray's counters reach its metrics page this often; the default of 10 s would delay every bench.
_METRICS_INTERVAL_MS = 1000
_HEALTH_POLL_S = 2.0
_OBJECT_STORE_BYTES = 256 * 2**20

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Endpoint:
    """A running application.

    Attributes:
        url: base URL, without `/v1`.
        model: the model name for clients that do not choose an arm.
        arms: names of the arms, which are model ids too; the first is the control arm.
        metrics_url: Prometheus page with vLLM's counters; None if not known.
    """

    url: str
    model: str
    arms: tuple[str, ...]
    metrics_url: str | None


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
        ServingError: an arm did not start; gives the engine's own error.
    """
    config = check_drafters(config)
    target = resolve(config.target)
    check_target(config, target)
    with _ray(config, address) as ours, _serve(config, ours=ours) as http:
        from ray import serve

        from carryover.serving.application import build_application
        from carryover.serving.startup import wait_until_running

        _check_resources(config)
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
                url, config.model, tuple(arm.name for arm in config.arms), _metrics_url()
            )
        finally:
            # Replicas that are still starting would be waited for; a cluster of ours just ends.
            if answering or not ours:
                _quietly("deleting the application", serve.delete, config.name)


@contextmanager
def _ray(config: ServeConfig, address: str | None) -> Iterator[bool]:
    """Connect to Ray, starting it on this machine if need be; gives whether it was started."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    if ray.is_initialized() and address is None:
        yield False
        return
    if address is None:
        claim_port(config.http)
    # Importing vLLM takes longer than starting Ray, which mostly waits: do both at once.
    imports = threading.Thread(target=_import_serving, daemon=True)
    before = set(psutil.Process().children(recursive=True))
    imports.start()
    try:
        if address is None:
            ray.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, ceil(_reserved_cpus(config))),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=_OBJECT_STORE_BYTES,
                _system_config={"metrics_report_interval_ms": _METRICS_INTERVAL_MS},
            )
        else:
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ConfigError(
                    f"no Ray cluster at {address!r}: {error}; start it, correct --address, or "
                    "leave it out to start one here"
                ) from None
        imports.join()
        yield address is None
    finally:
        _quietly("stopping Ray", ray.shutdown)
        if address is None:
            # Engines do not always notice that their replica is gone.
            end_processes(list(set(psutil.Process().children(recursive=True)) - before))


@contextmanager
def _serve(config: ServeConfig, *, ours: bool) -> Iterator[Http]:
    """Start Serve if it is not running on the cluster, and then stop it again.

    On a cluster of ours (`ours`), Serve ends with the cluster.
    """
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        present = bool(serve.status().proxies)
    except RayServeException:
        present = False
    if present:
        yield config.http
        return
    port = claim_port(config.http)
    http = config.http.model_copy(update={"port": port})
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": http.host, "port": port},
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )
    try:
        yield http
    finally:
        if not ours:
            _quietly("stopping Serve", serve.shutdown)


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


def claim_port(http: Http) -> int:
    """Return the port to listen on, after making sure that it is free.

    Raises:
        ServingError: the port is in use (says by what), or the host is not this machine's.
    """
    with socket.socket(socket.AF_INET6 if ":" in http.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((http.host, http.port))
        except OSError as error:
            raise ServingError(
                f"cannot listen on {http.host}:{http.port}: {error.strerror}"
                f"{_user_of(http.port)}; stop it, or choose another port with "
                "--set http.port=PORT (0 takes a free one)"
            ) from None
        return probe.getsockname()[1]


def _user_of(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == "LISTEN":
                if connection.pid is None:
                    break
                name = psutil.Process(connection.pid).name()
                return f" (used by process {connection.pid}, {name})"
    except psutil.Error:
        return ""
    return ""


def _import_serving() -> None:
    """Import the modules that bring vLLM, without their changes to this process's logging."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    quiet_vllm()
    logging.disable(logging.WARNING)
    try:
        with without_gc():
            importlib.import_module("carryover.serving.application")
    finally:
        logging.disable(logging.NOTSET)
        root.handlers[:], root.level = handlers, level
    for name in ("ray.serve", "ray.llm"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _reserved_cpus(config: ServeConfig) -> float:
    """CPUs that the application reserves: engines, replicas, and the ingress."""
    replicas = len(config.arms) * config.resources.replicas
    engine = config.resources.cpus_per_replica if config.resources.device == "cpu" else 0.0
    return replicas * (engine + 0.1) + 0.1


def _check_resources(config: ServeConfig) -> None:
    """Refuse what the cluster can never schedule; Serve would wait for it for ever."""
    import ray

    present = ray.cluster_resources()
    replicas = len(config.arms) * config.resources.replicas
    needed = {"CPU": _reserved_cpus(config)}
    if config.resources.device == "gpu":
        workers = replicas * config.engine.tensor_parallel_size
        needed["GPU"] = workers * config.resources.gpus_per_worker
    for name, amount in needed.items():
        if amount > present.get(name, 0.0) + 1e-6:
            raise ServingError(
                f"{replicas} replicas need {amount:g} {name}s, and the Ray cluster has "
                f"{present.get(name, 0.0):g}; lower resources.replicas or the resources of each, "
                "or serve fewer arms"
            )


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
            if answer.status_code == 200:
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


def _quietly(what: str, action: Callable[..., object], *arguments: object) -> None:
    """Clean up one thing; a failure must not keep the next from being cleaned up."""
    try:
        action(*arguments)
    except Exception as error:
        logger.warning("%s failed: %s", what, error)
