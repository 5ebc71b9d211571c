"""Train: ``python scripts/train.py [CONFIG.yaml] [--section.key value ...]``; the same command
resumes."""

import sys
from pathlib import Path

DESCRIPTION = """\
Fine-tune a language model by reinforcement learning on one GPU, or on a CPU.
Without arguments: the quick start. Started again, a run goes on where it stopped."""
SWITCHES = {
    "plan": "print the memory plan, from the model's config alone, and stop; with "
    "--memory.budget_gib it is for a GPU of that size, wherever it is called",
    "data-check": "read all data, print counts, lengths in tokens, three rendered prompts and the "
    "first errors, and stop; exit code 2 if there are errors",
    "quiet": "show warnings and errors only, as --log.console quiet does",
}


def main() -> int:
    """Read the command line, run, and turn a user's mistake into one line and exit code 2."""
    from reason_llm.errors import ReasonError, Stopped, shown
    from reason_llm.files import CLOSED_OUTPUT, discard_output, write_for_oneself

    try:
        from reason_llm.config import parse_command_line

        write_for_oneself()
        default = Path("configs/quickstart.yaml")
        config, given = parse_command_line(
            "python scripts/train.py", DESCRIPTION, default, sys.argv[1:], SWITCHES
        )
        from reason_llm.app.console import Console

        console = Console("quiet" if "quiet" in given else config.log.console)
        if "plan" in given:
            from reason_llm.model.plan import plan_only

            print("\n".join(plan_only(config).table()), flush=True)
            return 0
        if "data-check" in given:
            from reason_llm.app.data_check import check_data

            report = check_data(config)
            print("\n".join(report.lines), flush=True)
            return 2 if report.num_errors else 0
        from reason_llm.app.training import run_training

        run_training(config, console)
    except ReasonError as error:
        print(f"error: {shown(error)}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        discard_output()
        return CLOSED_OUTPUT
    except KeyboardInterrupt as stopped:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return stopped.exit_code if isinstance(stopped, Stopped) else 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
