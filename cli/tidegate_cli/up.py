"""`tidegate up`: everything on this machine, until Ctrl-C."""

import asyncio
from collections.abc import Callable

from rich.console import Console

from tidegate_cli.local import LocalSettings, LocalTidegate


async def stay_up(
    console: Console, *, local: LocalSettings, progress: Callable[[str], None]
) -> None:
    """Start everything and tell how to reach it; runs until it is cancelled, which stops it all.

    Raises:
        CommandError: Something didn't start.
        DevClusterError: The cluster didn't start, or a process ended by itself.
    """
    async with LocalTidegate(local, progress=progress) as tidegate:
        for line in await directions(tidegate):
            # As it is: a line that wraps can't be copied.
            console.print(line, highlight=False, soft_wrap=True, markup=False)
        await tidegate.guarded(asyncio.get_running_loop().create_future())


async def directions(tidegate: LocalTidegate) -> list[str]:
    """Return the lines that tell how to reach kubectl, the API and the metrics."""
    engines = await tidegate.engine_urls()
    return [
        "",
        "Kubernetes (namespace " + tidegate.namespace + "):",
        f"  export KUBECONFIG={tidegate.cluster.kubeconfig}"
        f" PATH={tidegate.cluster.kubectl.path.parent}:$PATH",
        f"  kubectl -n {tidegate.namespace} get tp,epool -o wide",
        f"  kubectl -n {tidegate.namespace} apply -f {tidegate.policies}/changes/gold-first.yaml",
        f"  export TIDEGATE_OPERATOR=http://127.0.0.1:{tidegate.operator.explain_port}",
        f"  tidegate top -n {tidegate.namespace}",
        f"  tidegate get decisions -n {tidegate.namespace}",
        f"  tidegate console -n {tidegate.namespace} --redis-url {tidegate.cluster.redis.url}",
        "",
        "OpenAI-compatible API:",
        f"  {tidegate.base_url}",
        *(f"  key of {tenant}: {key}" for tenant, key in tidegate.keys.items()),
        f"  curl {tidegate.base_url}/chat/completions \\",
        f"    -H 'Authorization: Bearer {tidegate.keys['gold']}' \\",
        "    -H 'Content-Type: application/json' \\",
        f'    -d \'{{"model": "{tidegate.model}", "max_tokens": 40, "messages":'
        ' [{"role": "user", "content": "Why do tides come twice a day?"}]}\'',
        "",
        "Metrics:",
        *(f"  {url}/metrics  (engine {pod})" for pod, url in engines.items()),
        f"  http://127.0.0.1:{tidegate.operator.metrics_port}/metrics  (operator)",
        "",
        f"Logs are in {tidegate.work_folder}. Ctrl-C stops everything and removes them.",
    ]
