#!/usr/bin/env python3
"""The Grafana boards: what each shows.

    python cluster/watch/boards.py        writes boards/*.json anew; a test compares them with this file

A Grafana file has some forty lines per panel, of which three say what is shown. So the boards are described here, and
`grafana.py` has the rest.
"""

from grafana import Board, Panel, text

_QUANTILES = (0.5, 0.95, 0.99)
API = 'endpoint!="other"'  # without paths that are not there
ALL_MODELS = 'model=~"$model"'
STARTS = 'ray_serve_deployment_replica_starts_total{deployment="engine"}'  # a series of each replica, of value 1


def rate(metric: str, by: str = "model", where: str = ALL_MODELS) -> str:
    return f"sum by ({by}) (rate({metric}{{{where}}}[$__rate_interval]))"


def mean(of: str, per: str, by: str = "model", where: str = ALL_MODELS) -> str:
    """The growth of one counter per growth of another."""
    return f"{rate(of, by, where)} / {rate(per, by, where)}"


def quantiles(buckets: str) -> dict[str, str]:
    """`buckets`: the metric with the label `le`."""
    buckets = rate(buckets, "le, model")
    return {f"{{{{model}}}} {quantile:.0%}": f"histogram_quantile({quantile}, {buckets})" for quantile in _QUANTILES}


def gauge(metric: str, by: str = "model", *, of: str = "sum") -> str:
    return f'{of} by ({by}) ({metric}{{model=~"$model"}})'


SERVICE = Board(
    "roundhouse-service",
    "Roundhouse: service",
    "What callers see: requests, waiting times, tokens, refusals; and whether everything is up.",
    "ray_roundhouse_requests_total",
    {
        "Requests": [
            Panel("Requests per second", {"{{model}}": rate("ray_roundhouse_requests_total")}, "reqps", stacked=True),
            Panel(
                "Requests per second, by status",
                {"{{status}}": rate("ray_roundhouse_requests_total", "status", API)},
                "reqps",
                "Also those that were refused before their model was known.",
                stacked=True,
            ),
            Panel(
                "Requests per second, by end",
                {"{{outcome}}": rate("ray_roundhouse_requests_total", "outcome", API)},
                "reqps",
                "refused: the caller's fault; failed: ours; left: the client went away; unread: it did not read.",
                stacked=True,
            ),
            Panel("Requests that are running", {"all": "sum(ray_roundhouse_requests_running)"}),
            Panel(
                "Requests per second, by endpoint",
                {"{{endpoint}}": rate("ray_roundhouse_requests_total", "endpoint", API)},
                "reqps",
                stacked=True,
            ),
            Panel(
                "Requests per second, by key",
                {"{{key}}": f"topk(10, {rate('ray_roundhouse_requests_total', 'key', API)})"},
                "reqps",
                stacked=True,
            ),
        ],
        "Times": [
            Panel("Time to the first token", quantiles("ray_roundhouse_first_token_seconds_bucket"), "s"),
            Panel(
                "Time in the queue",
                quantiles("ray_roundhouse_queue_seconds_bucket"),
                "s",
                "A part of the time to the first token: until the request has a place in a batch, and its adapter.",
            ),
            Panel(
                "Time from one token to the next",
                quantiles("ray_roundhouse_inter_token_seconds_bucket_total"),
                "s",
                "Tokens that are read together share the time since the last reading.",
            ),
            Panel("Time to the end of a request", quantiles("ray_roundhouse_request_seconds_bucket"), "s"),
            Panel(
                "Time of one step of the engine",
                {"{{model}}": mean("ray_roundhouse_engine_step_seconds_total", "ray_roundhouse_engine_steps_total")},
                "s",
                "The mean. A running request gets a token in each step that is not for prompts alone.",
            ),
        ],
        "Tokens": [
            Panel(
                "Completion tokens per second",
                {"{{model}}": rate("ray_roundhouse_completion_tokens_total")},
                stacked=True,
            ),
            Panel("Prompt tokens per second", {"{{model}}": rate("ray_roundhouse_prompt_tokens_total")}, stacked=True),
            Panel(
                "Prompt tokens from the prefix cache",
                {"{{model}}": mean("ray_roundhouse_cached_tokens_total", "ray_roundhouse_prompt_tokens_total")},
                "percentunit",
                most=1,
            ),
            Panel(
                "Completion tokens per second, by key",
                {"{{key}}": f"topk(10, {rate('ray_roundhouse_completion_tokens_total', 'key')})"},
                stacked=True,
            ),
            Panel(
                "Tool calls that did not parse, per second",
                {"{{model}}": rate("ray_roundhouse_replies_unparsed_total")},
                about="Such a reply is returned whole, as text.",
            ),
        ],
        "Images": [
            Panel(
                "Images per second, by what became of them",
                {"{{outcome}}": rate("ray_roundhouse_images_total", "outcome", "")},
                about="reused: prepared for an earlier request; refused: the caller's fault.",
                stacked=True,
            ),
            Panel(
                "Time of one image",
                {
                    "{{stage}}": mean(
                        "ray_roundhouse_image_seconds_sum", "ray_roundhouse_image_seconds_count", "stage", ""
                    )
                },
                "s",
                "The mean, of downloading and of preparing.",
            ),
        ],
        "State": [
            Panel(
                "Probes per second",
                {"{{path}} {{status}}": rate("ray_roundhouse_probes_total", "path, status", "")},
                "reqps",
                "They are not among the requests. A service that starts answers /readyz with 503.",
            ),
            Panel(
                "Replicas that run",
                {
                    "{{application}} {{deployment}}": "sum by (application, deployment) "
                    "(ray_serve_deployment_replica_healthy)"
                },
            ),
            Panel(
                "Parts of the configuration that were refused",
                {"{{section}}": "max by (section) (ray_roundhouse_config_error)"},
                about="The log and /readyz name them.",
            ),
            Panel("Nodes that are scraped", {"nodes": 'sum(ray_roundhouse_node_up) or sum(up{job="ray"})'}),
        ],
    },
)

ENGINE = Board(
    "roundhouse-engine",
    "Roundhouse: engine",
    "What each model's replicas do: batch, queue, KV cache, steps.",
    "ray_roundhouse_engine_blocks",
    {
        "Load": [
            Panel("Requests in the batch", {"{{model}}": gauge("ray_roundhouse_engine_running")}, stacked=True),
            Panel("Requests in the queue", {"{{model}}": gauge("ray_roundhouse_engine_waiting")}, stacked=True),
            Panel(
                "Busiest replica beside the average",
                {
                    "{{model}}": f"{gauge('ray_roundhouse_engine_running', of='max')} "
                    f"/ {gauge('ray_roundhouse_engine_running', of='avg')}"
                },
                about="1: all replicas of the model have as many requests.",
            ),
            Panel(
                "Requests of each replica",
                {
                    "{{model}} {{replica}}": gauge("ray_roundhouse_engine_running", "model, replica")
                    + " + "
                    + gauge("ray_roundhouse_engine_waiting", "model, replica")
                },
            ),
            Panel(
                "Requests that ended, per second",
                {
                    "{{model}} finished": rate("ray_roundhouse_engine_finished_total"),
                    "{{model}} cancelled": rate("ray_roundhouse_engine_aborted_total"),
                    "{{model}} failed": rate("ray_roundhouse_engine_failed_requests_total"),
                },
                "reqps",
            ),
            Panel(
                "Requests accepted, per second", {"{{model}}": rate("ray_roundhouse_engine_requests_total")}, "reqps"
            ),
        ],
        "KV cache": [
            Panel(
                "KV cache in use",
                {
                    "{{model}}": f"1 - {gauge('ray_roundhouse_engine_blocks_free')} "
                    f"/ {gauge('ray_roundhouse_engine_blocks')}"
                },
                "percentunit",
                "Blocks that running requests use.",
                most=1,
            ),
            Panel(
                "KV cache that holds prefixes",
                {
                    "{{model}}": f"{gauge('ray_roundhouse_engine_blocks_cached')} "
                    f"/ {gauge('ray_roundhouse_engine_blocks')}"
                },
                "percentunit",
                "Free blocks whose content a later prompt can use.",
                most=1,
            ),
            Panel(
                "Preemptions per second",
                {"{{model}}": rate("ray_roundhouse_engine_preemptions_total")},
                about="Of running requests, for lack of a block or for another key's turn. They are computed again.",
            ),
            Panel(
                "Prompt tokens from the prefix cache, by replica",
                {
                    "{{model}} {{replica}}": mean(
                        "ray_roundhouse_engine_cached_tokens_total",
                        "ray_roundhouse_engine_prompt_tokens_total",
                        "model, replica",
                    )
                },
                "percentunit",
                most=1,
            ),
        ],
        "Work": [
            Panel(
                "Tokens computed per second",
                {
                    "{{model}} prefill": rate("ray_roundhouse_engine_prefill_tokens_total"),
                    "{{model}} decode": rate("ray_roundhouse_engine_decode_tokens_total"),
                },
            ),
            Panel("Tokens sampled per second", {"{{model}}": rate("ray_roundhouse_engine_generated_tokens_total")}),
            Panel("Steps per second", {"{{model}}": rate("ray_roundhouse_engine_steps_total")}),
            Panel(
                "Tokens sampled per step",
                {
                    "{{model}}": mean(
                        "ray_roundhouse_engine_generated_tokens_total", "ray_roundhouse_engine_steps_total"
                    )
                },
                about="How full the batch is.",
            ),
            Panel(
                "Time in steps",
                {"{{model}} {{replica}}": rate("ray_roundhouse_engine_step_seconds_total", "model, replica")},
                "percentunit",
                "1: the engine has no pause.",
            ),
        ],
        "Health": [
            Panel(
                "Time since the last step while requests wait",
                {"{{model}} {{replica}}": gauge("ray_roundhouse_engine_stalled_seconds", "model, replica", of="max")},
                "s",
            ),
            Panel(
                "Engines that failed",
                {"{{model}}": gauge("ray_roundhouse_engine_failed")},
                about="Serve replaces their replicas.",
            ),
            Panel(
                "Replicas that were replaced within half an hour",
                {
                    "{{application}}": f"count by (application) (count_over_time({STARTS}[30m])) "
                    f"- max_over_time(count by (application) ({STARTS})[30m:1m])"
                },
                about="All that lived in that time, less the most that lived at a time.",
            ),
        ],
    },
)

ADAPTERS = Board(
    "roundhouse-adapters",
    "Roundhouse: adapters",
    "Checkpoints: which are used, how they are loaded, and whether they fit.",
    "ray_roundhouse_engine_adapter_slots",
    {
        "Use": [
            Panel(
                "Requests per second, by adapter",
                {"{{adapter}}": f"topk(10, {rate('ray_roundhouse_adapter_requests_total', 'adapter')})"},
                "reqps",
                "The first characters of the adapter's digest; rarely used ones share `other`.",
                stacked=True,
            ),
            Panel(
                "Completion tokens per second, by adapter",
                {"{{adapter}}": f"topk(10, {rate('ray_roundhouse_adapter_completion_tokens_total', 'adapter')})"},
                stacked=True,
            ),
            Panel(
                "Prompt tokens per second, by adapter",
                {"{{adapter}}": f"topk(10, {rate('ray_roundhouse_adapter_prompt_tokens_total', 'adapter')})"},
                stacked=True,
            ),
            Panel(
                "Prompt tokens from the prefix cache, by adapter",
                {
                    "{{adapter}}": mean(
                        "ray_roundhouse_adapter_cached_tokens_total",
                        "ray_roundhouse_adapter_prompt_tokens_total",
                        "adapter",
                    )
                },
                "percentunit",
                most=1,
            ),
            Panel(
                "Requests with an adapter, per second, by base model",
                {"{{model}}": rate("ray_roundhouse_adapter_requests_total")},
                "reqps",
                stacked=True,
            ),
        ],
        "Slots": [
            Panel(
                "Slots in use",
                {
                    "{{model}} loaded": gauge("ray_roundhouse_engine_adapters_loaded"),
                    "{{model}} in running requests": gauge("ray_roundhouse_engine_adapters_pinned"),
                    "{{model}} slots": gauge("ray_roundhouse_engine_adapter_slots"),
                },
            ),
            Panel(
                "Slots that running requests hold, of the fullest replica",
                {
                    "{{model}}": 'max by (model) (ray_roundhouse_engine_adapters_pinned{model=~"$model"} '
                    '/ ray_roundhouse_engine_adapter_slots{model=~"$model"})'
                },
                "percentunit",
                "At 1, a request with another adapter waits for one of these to end.",
                most=1,
            ),
            Panel("Evictions per second", {"{{model}}": rate("ray_roundhouse_engine_adapter_evictions_total")}),
        ],
        "Host memory": [
            Panel(
                "Adapters in host memory",
                {"{{model}}": gauge("ray_roundhouse_engine_adapters_in_memory")},
                about="Of all replicas. One that lost its slot is put back from here, without reading it again.",
            ),
            Panel("Host memory of adapters", {"{{model}}": gauge("ray_roundhouse_engine_adapter_bytes")}, "bytes"),
            Panel(
                "Adapters that are being read, or wait for it",
                {"{{model}}": gauge("ray_roundhouse_engine_adapters_loading")},
            ),
        ],
        "Loading": [
            Panel("Loads per second", {"{{model}}": rate("ray_roundhouse_engine_adapter_loads_total")}),
            Panel(
                "Time of one load",
                {
                    "{{model}}": mean(
                        "ray_roundhouse_engine_adapter_load_seconds_total", "ray_roundhouse_engine_adapter_loads_total"
                    )
                },
                "s",
                "The mean, from the start of a read to the step that takes the adapter in.",
            ),
            Panel(
                "Refusals per second",
                {"{{model}}": rate("ray_roundhouse_engine_adapter_refusals_total")},
                about="Adapters that the model cannot apply. Their callers get 422.",
            ),
        ],
        "Checkpoint store": [
            Panel("Read from folders, per second", {"reads": rate("ray_roundhouse_checkpoint_reads_total", "job", "")}),
            Panel("Downloaded, per second", {"downloads": rate("ray_roundhouse_checkpoint_fetches_total", "job", "")}),
            Panel(
                "Dropped from the disk cache, per second",
                {"dropped": rate("ray_roundhouse_checkpoint_evictions_total", "job", "")},
            ),
        ],
    },
)

BOARDS = (SERVICE, ENGINE, ADAPTERS)


if __name__ == "__main__":
    for each in BOARDS:
        each.path.write_text(text(each), encoding="utf-8")
        print(each.path)
