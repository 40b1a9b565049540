"""The fuzz of the server's tests, with more messages. All are answered, and an honest client is served meanwhile."""

from harness import check, soak_trial
from serving_helpers import state_policy
from test_server_fuzz import NUM_CLIENTS, attack

ROUND = 20_000  # messages to one server

if __name__ == "__main__":
    with soak_trial("fuzz", __doc__, trials=100_000) as trial:
        check(trial.options.trials % NUM_CLIENTS == 0, f"--trials must be a multiple of {NUM_CLIENTS}")
        policy = state_policy()
        for sent in range(0, trial.options.trials, ROUND):
            num_messages = min(ROUND, trial.options.trials - sent)
            attack(policy, num_messages, seed=trial.rng.randrange(2**32))
            trial.say(f"{sent + num_messages:,} of {trial.options.trials:,} messages")
        trial.held(
            "random and damaged messages to the server, from 8 clients beside an honest client",
            f"{trial.options.trials:,} messages",
            "all were answered or refused with a reason; no error in the server; every honest answer was right",
        )
