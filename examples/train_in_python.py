"""acrlpd as a library, in twenty lines: data, agent, updates, evaluation, one chunk, and a curve.

A point learns to go to the right end of a corridor, although half of its demonstrations go to the wrong end. The script
takes seconds on a CPU and needs no simulator: `pip install acrlpd` is enough.
"""

import json

import acrlpd

config = acrlpd.get_config("corridor", {"data.data_dir": "./data/train_in_python"})


def main():
    with acrlpd.open_dataset(config) as dataset:  # collects the demonstrations the first time
        agent = acrlpd.create_agent(config)
        agent, metrics = acrlpd.update_agent(config, agent, dataset, 400)
        policy = acrlpd.create_policy(config, agent, dataset)
        summary = acrlpd.evaluate(policy, num_workers=0).summary
        print(f"success {summary.success_rate:.0%} in {summary.episodes} episodes")
        observation = {"observation.state": dataset.table.columns["observation.state"][0]}
        print("the first actions:", acrlpd.act(policy, observation)[0].round(2))
        print("saved to", acrlpd.save_agent(config, agent, dataset))
    for step in range(0, 400, 100):
        print(json.dumps({"step": step, "critic_loss": metrics[step]["critic_loss"]}))


if __name__ == "__main__":  # the processes that play import this file
    main()
