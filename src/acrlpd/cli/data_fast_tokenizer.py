"""`acrlpd data fast_tokenizer`: a tokenizer for the actions of a dataset, with every flag that `acrlpd train` has."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt

from acrlpd.config.command_line import Flag, parse_config_args
from acrlpd.data.tools.fast_tokenizer import fit_config_tokenizer
from acrlpd.text import print


@dataclasses.dataclass(frozen=True)
class TokenizerOptions:
    """Fit a FAST tokenizer on the action chunks of a config's dataset, from its columns alone."""

    # Directory of the new tokenizer.
    output: Path
    # Tokens of the vocabulary, the 256 bytes included. More: fewer tokens in a chunk, each seen less often.
    vocab_size: Annotated[int, Ge(256)] = 1024
    # Steps of a coefficient per unit of normalised action. Higher: finer actions, more tokens.
    scale: Annotated[float, Gt(0)] = 10.0
    # Replace a tokenizer in the directory.
    overwrite: Flag = False


def main(args: Sequence[str]) -> int:
    config, options = parse_config_args(TokenizerOptions, args, prog="acrlpd data fast_tokenizer")
    report = fit_config_tokenizer(
        config, options.output, vocab_size=options.vocab_size, scale=options.scale, overwrite=options.overwrite
    )
    horizon, model = config.model.action_horizon, config.model
    print(f"{report.num_chunks} chunks of {horizon} x {model.action_dim}, largest action {report.largest_action:.3g}")
    print(
        f"{report.tokenizer.vocab_size} tokens; a chunk takes {report.mean_tokens:.1f} tokens on average and "
        f"{report.most_tokens} at most; an action is off by at most {report.largest_error:.3g} (normalised)"
    )
    print(f"actions up to {report.tokenizer.largest_action(horizon):.3g} can be written, whatever a chunk looks like")
    print(f"wrote {options.output}")
    print(
        f"train with --model.fast_tokenizer {options.output.absolute()} and --model.max_action_tokens "
        f"{report.needed_tokens} or more"
    )
    return 0
