"""The commands' signatures and help, and the checks that need no model; importing this does not import torch."""

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Exit, Option, echo

from mla_compile.cli.flags import flags_of, taken
from mla_compile.cli.machine import share_cores
from mla_compile.cli.prompts import read_grammar, read_prompts, result_writer
from mla_compile.defaults import DEFAULT_DRAFTS, DEFAULT_MAX_TOKENS, MAX_DRAFTS, SHIPPED_MODEL
from mla_compile.engine_settings import CheckpointSettings, EngineFields
from mla_compile.errors import MLAError
from mla_compile.hub import find_checkpoint
from mla_compile.sampling_params import OF_GENERATION_CONFIG, SamplingParams
from mla_compile.serving.settings import ServerSettings

_SHIPPED = str(SHIPPED_MODEL)
Model = Annotated[
    str,  # a Path would lose what tells "./org/name" from a name
    Option(
        metavar="DIR",
        help="Checkpoint in Hugging Face format; or ORG/NAME, a model in the local Hugging Face cache.",
        show_default="the shipped model",
    ),
]


@flags_of(SamplingParams, CheckpointSettings, EngineFields, **dict.fromkeys(OF_GENERATION_CONFIG))
def generate(
    *,
    model: Model = _SHIPPED,
    prompt: Annotated[
        str | None, Option(metavar="TEXT", help="A prompt; its completion is streamed.")
    ] = None,
    input_file: Annotated[
        Path | None,
        Option(
            "--input",
            metavar="FILE",
            help='Prompts, one per line: {"prompt": TEXT} or {"prompt_token_ids": [ID, ...]}. A line may have its own '
            'settings: {"prompt": TEXT, "max_tokens": 3, "temperature": 0.7}. Blank lines are skipped. '
            '"-" reads stdin.',
        ),
    ] = None,
    output_file: Annotated[
        Path | None,
        Option("--output", metavar="FILE", help="Write the JSON lines to this file.", show_default="stdout"),
    ] = None,
    max_new_tokens: Annotated[
        int, Option(metavar="N", min=1, help="Tokens per completion at most.")
    ] = DEFAULT_MAX_TOKENS,
    json_schema: Annotated[
        Path | None,
        Option(metavar="FILE", help="Completions are JSON that matches this schema; needs llguidance."),
    ] = None,
    regex: Annotated[
        str | None, Option(metavar="R", help="Completions match this regular expression; needs llguidance.")
    ] = None,
    ebnf: Annotated[
        Path | None,
        Option("--grammar", metavar="FILE", help="Completions follow this Lark grammar; needs llguidance."),
    ] = None,
    **settings: Any,
) -> None:
    """Complete prompts with a checkpoint.

    The completion of --prompt is streamed to stdout. The prompts of --input are completed together and give one JSON
    line each, in order: line (the prompt's, from 1), token_ids, text, finish_reason ("stop" or "length"),
    acceptance_length and, with --logprobs, logprobs: for each token, {ID: {"logprob": ..., "rank": ...}, ...}. With
    --n 2 or more, a line is {"line": ..., "completions": [...]}, and each completion has the other keys. If a grammar
    reaches a dead end, or the model's logits are NaN or infinite, finish_reason is "error", and error has the reason. A
    malformed line is reported before anything runs.

    A line of --input may have its own settings, named as in SamplingParams, which override the flags:
    max_tokens, temperature, top_k, top_p, min_p, seed, repetition_penalty, presence_penalty, frequency_penalty,
    logprobs, n, stop, stop_token_ids, ignore_eos, min_tokens, logit_bias, include_stop_str_in_output,
    skip_special_tokens.
    """
    given = {name: value for name, value in taken(settings, SamplingParams).items() if value is not None}
    sampling = SamplingParams(**given)
    if settings["batch_invariant"] and settings["compile"] is False:
        raise MLAError("--batch-invariant", "compiled steps", "--no-compile", "use only one of the two")
    rules = read_grammar({"--json-schema": json_schema, "--grammar": ebnf}, regex)
    directory = _directory(model)
    prompts = read_prompts(prompt, input_file, given)
    if prompt is not None and sampling.logprobs is not None and output_file is None:
        expected = "an output file for JSON lines"
        raise MLAError("--logprobs", expected, "--prompt without --output", "add --output FILE")
    write = result_writer(output_file, input_file, streamed=prompt is not None)
    share_cores()
    from mla_compile.cli.generate import complete

    complete(
        prompts,
        write,
        model=directory,
        checkpoint_settings=CheckpointSettings(**taken(settings, CheckpointSettings)),
        max_new_tokens=max_new_tokens,
        grammar=rules,
        **settings,
    )


def inspect(
    *,
    model: Model = _SHIPPED,
    num_speculative_tokens: Annotated[
        int, Option(metavar="K", min=0, max=MAX_DRAFTS, help="Drafts; a decode row has K + 1 tokens.")
    ] = DEFAULT_DRAFTS,
    rows: Annotated[int, Option(metavar="R", min=0, max=4096, help="Decode rows.")] = 4,
    prefill_tokens: Annotated[
        int | None,
        Option(
            metavar="N", min=0, max=65536, help="Tokens of a prompt chunk.", show_default="48; 0 with --step"
        ),
    ] = None,
    step: Annotated[
        bool, Option("--step", help="Show the whole decode step, drafts included, not a mixed batch.")
    ] = False,
    output: Annotated[
        Path | None, Option(metavar="FILE.svg", help="Also save a picture.", show_default=False)
    ] = None,
) -> None:
    """Show the graph before and after the passes, without running it.

    Attention is shown by segment: decode rows, then prompts.
    """
    if step and prefill_tokens:
        raise MLAError("--prefill-tokens", "0 with --step, which only decodes", prefill_tokens)
    if output is not None and output.suffix.lower() != ".svg":
        raise MLAError("--output", "a file name that ends in .svg", output)
    write = result_writer(output, None, streamed=True)  # checks the file before anything runs
    directory = _directory(model)
    import torch

    from mla_compile.explanation.inspect import inspect_forward, inspect_step
    from mla_compile.explanation.picture import draw
    from mla_compile.models import load_model
    from mla_compile.models.checkpoint import LoadSettings, open_checkpoint

    if step:  # computes rotary frequencies, so meta tensors are not enough
        explanation = inspect_step(
            load_model(directory), num_speculative_tokens=num_speculative_tokens, rows=rows
        )
    else:
        explanation = inspect_forward(
            open_checkpoint(directory, LoadSettings(), dtype=torch.float32)[0],
            num_speculative_tokens=num_speculative_tokens,
            rows=rows,
            prefill_tokens=48 if prefill_tokens is None else prefill_tokens,
        )
    echo(str(explanation), nl=False)
    if output is not None:
        write(draw(explanation.graphs, explanation.layers).splitlines())
        echo(f"\npicture: {output}")


def env(
    *,
    verbose: Annotated[
        bool,
        Option(
            "--verbose", help="List the candidates of each op, their constraints, and why they do not work."
        ),
    ] = False,
) -> None:
    """Print what runs models here by default, and versions.

    Include it in bug reports, with --verbose if an op is slow or fails.
    """
    from mla_compile.cli.environment import print_environment

    print_environment(verbose=verbose)


def demo(
    *,
    model: Model = _SHIPPED,
    max_new_tokens: Annotated[int, Option(metavar="N", min=2, help="Tokens per completion at most.")] = 80,
    compile: Annotated[bool, Option("--compile/--no-compile", help="Compile the decode step.")] = True,
) -> None:
    """Complete two prompts in three ways, and compare the tokens.

    Runs uncompiled, compiled, and compiled with speculation: on the CPU, greedily, in float32.

    Exit code 1 if the tokens differ.
    """
    directory = _directory(model)
    from mla_compile.cli.demo import compare

    compare(directory, max_new_tokens=max_new_tokens, compile=compile)


@flags_of(ServerSettings, EngineFields, allowed_hosts=None, allowed_origins=None)
def serve(
    *,
    model: Model = _SHIPPED,
    host: Annotated[
        str, Option(metavar="ADDRESS", help="Address to listen on; 0.0.0.0: all interfaces.")
    ] = "127.0.0.1",
    port: Annotated[
        int, Option(metavar="NUMBER", min=0, max=65535, help="Port to listen on; 0: any free one.")
    ] = 8000,
    api_key_file: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="API keys, one per line; clients must send one. MLA_COMPILE_API_KEY may hold another.",
            show_default="no key is needed",
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        Option(
            metavar="N",
            min=1,
            help="Engines on Ray Serve, one per GPU or on the CPU; needs the extra ray.",
            show_default="one, without Ray",
        ),
    ] = None,
    **settings: Any,
) -> None:
    """Serve a checkpoint over an OpenAI-compatible API.

    A page at / shows speculation live.

    Endpoints: /v1/models, /v1/completions, /v1/chat/completions, /tokenize, /health, /ready, /metrics.
    Needs `pip install '.[serve]'` in the clone.
    """
    directory = _directory(model)
    share_cores()
    from mla_compile.cli.serve import serve_checkpoint

    serve_checkpoint(
        host=host,
        port=port,
        model=directory,
        api_key_file=api_key_file,
        replicas=replicas,
        engine=taken(settings, EngineFields),
        **settings,
    )


@flags_of(CheckpointSettings, EngineFields, capture_budget=2**31)
def plan(
    model: Annotated[
        str,
        Argument(
            metavar="MODEL_DIR",
            help="A directory with the config.json of a checkpoint; or ORG/NAME, a model in the local Hugging Face "
            "cache.",
        ),
    ],
    *,
    gpus: Annotated[
        int | None, Option(metavar="N", min=1, help="GPUs that share one model.", show_default="1")
    ] = None,
    gpu_memory: Annotated[
        str | None,
        Option(
            metavar="SIZE",
            help="Memory of each GPU: 141GB, 80GiB, ....",
            show_default="that of the first GPU here, else 141GB",
        ),
    ] = None,
    **settings: Any,
) -> None:
    """Print the memory that a model needs on each GPU.

    Reads only config.json, and the headers of a head. Prints the bytes of weights, cache, steps and graphs, the
    requests that fit, and, if it does not fit, changes that would. The flags and their defaults are those of
    serve, except --capture-budget. Without --gpus and --gpu-memory it plans for this machine: for its GPU, else for
    its CPU.

    Exit code 1 if it does not fit.
    """
    directory = _directory(model, "MODEL_DIR")
    from mla_compile.cli.plan import PlanRequest, print_plan

    engine = taken(settings, EngineFields)
    if not print_plan(PlanRequest.of(gpus, gpu_memory, model=directory, settings=engine, **settings)):
        raise Exit(1)


def _directory(model: str, argument: str = "--model") -> Path:
    """The directory of a checkpoint that is given as one, or by its name in the Hugging Face cache."""
    directory = find_checkpoint(model, argument)
    if not directory.is_dir():
        hint = "give a directory in Hugging Face format"
        found = "a file" if directory.is_file() else "no such directory"
        raise MLAError(f"{argument} {model}", "a checkpoint's directory", found, hint)
    return directory
