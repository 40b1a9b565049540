"""Drives gym-aloha with a served policy: asks for an action chunk, executes part of it, asks again.

    pip install 'acrlpd[sim,serve]' && pip install --no-deps openpi-client
    acrlpd serve checkpoints/aloha_sim/default          # in another terminal
    python examples/aloha_sim_client.py --episodes 10

The client is openpi's own, unmodified; a robot that uses it connects in the same way.
"""

import argparse
import pathlib
from typing import Any

import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy

from acrlpd.envs import make_env
from acrlpd.envs.episodes import write_video

# The server's name of a camera -> the simulator's name.
CAMERAS = {
    "images/cam_high": "observation.images.top",
    "images/cam_left_wrist": "observation.images.left_wrist",
    "images/cam_right_wrist": "observation.images.right_wrist",
}


def observation(env: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    """The present observation as openpi's ALOHA clients send it: images with channels first."""
    columns = env.observe()
    images = {
        name.removeprefix("images/"): np.moveaxis(columns[CAMERAS[name]], -1, 0) for name in seen_cameras(metadata)
    }
    # A policy that was trained with a single prompt gets that prompt from the server.
    prompt = {} if metadata["prompt"] else {"prompt": env.prompt}
    return {"state": columns["observation.state"], "images": images, **prompt}


def seen_cameras(metadata: dict[str, Any]) -> list[str]:
    return [name for name in metadata["observation"] if name in CAMERAS]


def play(env: Any, client: WebsocketClientPolicy, args: argparse.Namespace, seed: int) -> bool:
    """Plays one episode; returns whether it succeeded."""
    metadata = client.get_server_metadata()
    env.reset(seed)
    frames: list[np.ndarray] = []
    while True:
        reply = client.infer(observation(env, metadata))
        for action in reply["actions"][: args.replan_steps or metadata["replan_steps"]]:
            step = env.step(action)
            if args.videos is not None:
                frames.append(env.render())
            if step.terminated or step.truncated:
                if args.videos is not None:
                    write_video(args.videos / f"{seed}.mp4", frames, env.spec.fps)
                return step.success


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--env", default="gym_aloha/AlohaTransferCube-v0")
    parser.add_argument("--episodes", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replan_steps", type=int, help="steps of a chunk that are executed; the server's by default")
    parser.add_argument("--max_episode_steps", type=int, default=300)
    parser.add_argument("--videos", type=pathlib.Path, help="directory for films of the episodes")
    args = parser.parse_args()

    client = WebsocketClientPolicy(args.host, args.port)
    metadata = client.get_server_metadata()
    print(f"connected: {metadata['config']}, step {metadata['checkpoint_step']}, best of {metadata['best_of_n']}")
    env = make_env(
        args.env,
        cameras=tuple(CAMERAS[name] for name in seen_cameras(metadata)),
        image_size=tuple(metadata["image_size"] or (224, 224)),
        max_episode_steps=args.max_episode_steps,
    )
    successes = 0
    for episode in range(args.episodes):
        success = play(env, client, args, args.seed + episode)
        successes += success
        print(f"episode {episode}: {'success' if success else 'failure'} ({successes} of {episode + 1})")
    env.close()


if __name__ == "__main__":
    main()
