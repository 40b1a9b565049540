"""acrlpd as a library, in twenty lines: data, agent, updates, evaluation, one chunk, and a curve.

The settings are tiny, so the script takes seconds on a CPU and the policy learns little. Needs `acrlpd[sim]`.
"""

import json

import acrlpd

config = acrlpd.get_config(
    "quickstart",
    {
        "model": "state_flow",  # a small policy that reads the state alone; leave it out for the tiny pi0
        "model.state_dim": 20,
        "model.hidden_dims": (64, 64),
        "critic.hidden_dims": (64, 64),
        "backup.hidden_dims": (64, 64),
        "data.data_dir": "./data/train_in_python",
        "data.demonstrations.num_episodes": 4,
        "evaluation.num_episodes": 2,
        "evaluation.best_of_n": 8,
        "env.num_envs": 2,
    },
)


def main():
    with acrlpd.open_dataset(config) as dataset:  # collects the demonstrations the first time
        agent = acrlpd.create_agent(config)
        agent, metrics = acrlpd.update_agent(config, agent, dataset, 50)
        policy = acrlpd.create_policy(config, agent, dataset)
        result = acrlpd.evaluate(policy, num_workers=0)
        print(f"success {result.summary.success_rate:.0%} in {result.summary.episodes} episodes")
        observation = {"observation.state": dataset.table.columns["observation.state"][0]}
        print("the first actions:", acrlpd.act(policy, observation)[0].round(2))
        print("saved to", acrlpd.save_agent(config, agent, dataset))
    print("\n".join(json.dumps({"step": i, "critic_loss": row["critic_loss"]}) for i, row in enumerate(metrics, 1)))


if __name__ == "__main__":  # the processes that play import this file
    main()
