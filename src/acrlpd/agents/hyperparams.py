"""The algorithm as plain data: critics, losses, best-of-N, temperature, chunks.

Symbols as in the documentation: H = horizon_length, N = num_action_samples, E = num_critics,
T = the policy's action_horizon.
"""

import dataclasses
from typing import Literal

Activation = Literal["relu", "swish", "gelu", "tanh"]
QAggregation = Literal["min", "mean", "weighted"]
FeatureFusion = Literal["concat", "add", "mlp"]
ActorLoss = Literal["awr", "best_of_n", "policy_gradient"]
CriticLoss = Literal["mse", "huber"]
BestOfNStrategy = Literal["auto", "parallel", "chunked", "sequential"]


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """The ensemble of Q networks on [policy features, state, first H actions]."""

    # Networks in the ensemble (E). More: more pessimism under "min", better disagreement, more compute.
    num_critics: int = 10
    # Hidden layers of each network. Wider: fits sharper values, overfits small data sooner.
    hidden_dims: tuple[int, ...] = (512, 512, 512)
    # LayerNorm after every hidden layer; keeps values bounded off the data. Turn off only for ablations.
    use_layer_norm: bool = True
    # Share of hidden units dropped while the critic trains; 0 disables.
    dropout_rate: float = 0.0
    # Nonlinearity of the hidden layers.
    activation: Activation = "gelu"
    # Scale of the variance-scaling initialiser. Larger: larger initial values and disagreement.
    kernel_init_scale: float = 1.0
    # How E values become one, for targets and for selection. "min" is pessimistic, "mean" is not,
    # "weighted" learns a softmax over the members.
    q_aggregation: QAggregation = "min"
    # Aggregate targets over this many randomly drawn members (REDQ); None: over all. Smaller: less pessimism.
    target_subset_size: int | None = None
    # Whether critics see the policy's pooled prefix features; off: the state alone (cheap, blind to images).
    use_pi0_features: bool = True
    # How features and state are joined: side by side, summed after projection, or through a learned layer.
    feature_fusion_method: FeatureFusion = "concat"


@dataclasses.dataclass(frozen=True)
class LossWeights:
    """How the four losses add up to the total."""

    # Weight of the TD loss. Critics have an optimizer of their own, so this mostly shifts the reported total.
    critic_weight: float = 1.0
    # Weight of the policy-improvement loss. 0: the policy is only cloned.
    actor_weight: float = 1.0
    # Weight of behaviour cloning. Higher: closer to the data, safer, less improvement.
    bc_weight: float = 0.01
    # Weight of the temperature loss.
    alpha_weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class BestOfNConfig:
    """How N candidates are computed and one is chosen. The strategy never changes the result."""

    # "parallel" is fastest, "sequential" smallest, "chunked" between; "auto" decides from a memory estimate.
    strategy: BestOfNStrategy = "auto"
    # Candidates computed at a time by "chunked".
    chunk_size: int = 32
    # Memory that "auto" may spend on candidates, in MiB per device.
    memory_limit_mib: int = 4_096
    # Choose among the k best; 1: always the best. Larger: more exploration.
    top_k: int = 1
    # Softmax temperature over the k best; None: the learned temperature alpha. Higher: more uniform.
    selection_temperature: float | None = None
    # Bonus on a candidate's value per unit of mean distance to the other candidates; 0 disables.
    diversity_weight: float = 0.0


@dataclasses.dataclass(frozen=True)
class ACRLPDHyperparams:
    """Losses, sampling, targets and temperature."""

    loss_weights: LossWeights = dataclasses.field(default_factory=LossWeights)

    # Policy improvement: "awr" weights cloning by advantage, "best_of_n" clones the best candidate,
    # "policy_gradient" follows the critic's gradient through the denoising steps (most memory).
    actor_loss: ActorLoss = "awr"
    # Candidates per observation (N) for targets, advantages and acting. More: greedier and slower.
    num_action_samples: int = 4
    # Euler steps of the flow when candidates are sampled. Fewer: faster, coarser actions.
    sampling_steps: int = 10
    best_of_n: BestOfNConfig = dataclasses.field(default_factory=BestOfNConfig)

    # Weight of a reward one environment step later. Higher: longer foresight, slower value learning.
    discount: float = 0.99
    # Share of the online critics that enters the target critics at each update.
    target_update_tau: float = 0.005
    # Error measure of the TD loss; "huber" limits the pull of outliers.
    critic_loss: CriticLoss = "mse"
    # Error beyond which "huber" becomes linear.
    huber_delta: float = 1.0
    # Whether the TD loss also trains the policy through the shared features.
    critic_gradient_to_policy: bool = False
    # First updates in which only critics and temperature learn, so that advantages mean something.
    critic_warmup_steps: int = 0

    # Largest AWR weight exp(advantage / temperature) before normalisation. Lower: closer to cloning.
    awr_weight_clip: float = 100.0
    # Weight cloning by each sample's AWR-style importance as well.
    bc_importance_weighting: bool = False
    # Weight cloning by each sample's own loss, so that hard samples count more.
    bc_difficulty_weighting: bool = False

    # Temperature alpha at the start (and for good if it is not learned): of AWR and of selection.
    initial_temperature: float = 1.0
    # Learn alpha so that the entropy of the candidates approaches the target.
    learnable_temperature: bool = True
    # Target entropy = -multiplier * real action_dim. Larger: less exploration wanted.
    target_entropy_multiplier: float = 0.5
    # The target entropy itself; None: from the multiplier.
    target_entropy: float | None = None

    # Decay of the policy's moving average, which is what is evaluated and exported; None: no average.
    # Closer to 1: smoother, lags more.
    ema_decay: float | None = 0.999


@dataclasses.dataclass(frozen=True)
class QChunkingConfig:
    """What the critic calls an action."""

    # Steps per chunk (H): actions per value, steps per bootstrap. At most the policy's action_horizon.
    # Longer: faster value propagation, harder to fit, slower reaction.
    horizon_length: int = 20
    # Real action dims of the robot; the policy pads to its own action_dim (32).
    action_dim: int = 14
    # Share of each batch whose window lies wholly inside its episode. Lower: more episode ends.
    sequence_ratio: float = 0.7
    # Actions the critic sees; None: all H. 1 gives the n-step baseline without chunks (n = H).
    critic_action_horizon: int | None = None
