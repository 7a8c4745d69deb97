"""Ray Serve application: the arms of one target side by side.

`platform serve` uses the same builder; this is its entry for Ray's own tools:

    serve run serve_apps.ab:build target=embedded ...
    import_path: serve_apps.ab:build    # in a Serve or RayService configuration, with `args`

The annotation is a real class on purpose: Serve validates `args` with it, and skips that when
annotations are strings.
"""

from ray.serve import Application

from carryover.serving.application import build_application
from carryover.serving.config import ServeConfig


def build(args: ServeConfig) -> Application:
    """Build the application from its configuration."""
    return build_application(args)
