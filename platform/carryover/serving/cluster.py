"""The Ray cluster and the Ray Serve instance below an application: joined, or started and ended."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil

import psutil

from carryover.engine import quiet_vllm
from carryover.errors import ConfigError, ServingError
from carryover.guardian import end_processes
from carryover.serving.config import Http, ServeConfig
from carryover.serving.preload import without_gc

# Ray's counters reach its metrics page this often; the default of 10 s would delay every bench.
_METRICS_INTERVAL_MS = 1000
_OBJECT_STORE_BYTES = 256 * 2**20

logger = logging.getLogger(__name__)


@contextmanager
def connected(config: ServeConfig, address: str | None) -> Iterator[bool]:
    """Be connected to Ray inside the block; gives whether a cluster was started for it.

    Args:
        config: of the application that is to be deployed.
        address: of a cluster; None takes the one that this process is connected to, else starts
            one on this machine, which ends with the block.

    Raises:
        ConfigError: no cluster at that address.
        ServingError: the port is in use.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    if ray.is_initialized() and address is None:
        import_serving()
        yield False
        return
    if address is None:
        claim_port(config.http)
    # Importing vLLM takes longer than starting Ray, which mostly waits: do both at once.
    imports = threading.Thread(target=import_serving, daemon=True)
    before = set(psutil.Process().children(recursive=True))
    imports.start()
    try:
        with interrupts_held():
            _join_ray(address, config)
            imports.join()
        yield address is None
    finally:
        quietly("stopping Ray", ray.shutdown)
        if address is None:
            # Engines do not always notice that their replica is gone.
            end_processes(list(set(psutil.Process().children(recursive=True)) - before))


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold back Ctrl-C until the end of the block.

    Raised inside Ray's compiled start-up code, the interrupt can be swallowed there, and leave a
    lock of `logging` taken for which the thread that imports then waits for ever.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous or signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


def _join_ray(address: str | None, config: ServeConfig) -> None:
    """Start Ray here, or join the cluster at `address`."""
    import ray

    from carryover.local_ray import start_local_ray

    if address is None:
        start_local_ray(
            num_cpus=max(os.cpu_count() or 1, ceil(reserved_cpus(config))),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=_OBJECT_STORE_BYTES,
            _system_config={"metrics_report_interval_ms": _METRICS_INTERVAL_MS},
        )
        return
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"no Ray cluster at {address!r}: {error}; start it, correct --address, or "
            "leave it out to start one here"
        ) from None


@contextmanager
def serve_started(config: ServeConfig, *, ours: bool) -> Iterator[Http]:
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
            quietly("stopping Serve", serve.shutdown)


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


def import_serving() -> None:
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


def reserved_cpus(config: ServeConfig) -> float:
    """CPUs that the application reserves: engines, replicas, the ingress, and the controller."""
    replicas = len(config.arms) * config.resources.replicas
    engine = config.resources.cpus_per_replica if config.resources.device == "cpu" else 0.0
    return replicas * (engine + 0.1) + config.ingress.replicas * 0.1 + 0.1


def check_resources(config: ServeConfig) -> None:
    """Refuse what the cluster can never schedule; Serve would wait for it for ever."""
    import ray

    present = ray.cluster_resources()
    replicas = len(config.arms) * config.resources.replicas
    needed = {"CPU": reserved_cpus(config)}
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


def quietly(what: str, action: Callable[..., object], *arguments: object) -> None:
    """Clean up one thing; a failure must not keep the next from being cleaned up."""
    try:
        action(*arguments)
    except Exception as error:
        logger.warning("%s failed: %s", what, error)
