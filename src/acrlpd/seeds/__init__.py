"""The Python names of the seed documents, for code that was written with the seeds in hand.

Every name here is a few lines that call the rest of the package, whose own names are shorter; nothing is implemented
twice. docs/from_the_seeds.md lists all names of the seeds with their counterparts.
"""

from acrlpd.seeds.agent import (
    ACRLPDPi0Agent,
    OpenPITrainState,
    create_acrlpd_pi0_agent,
    create_acrlpd_pi0_agent_from_rl_config,
)
from acrlpd.seeds.checkpoints import (
    create_checkpoint_metadata,
    export_acrlpd_model,
    load_acrlpd_checkpoint,
    load_pi0_weights_from_openpi,
    save_acrlpd_checkpoint,
    save_openpi_pi0_checkpoint,
    save_unified_checkpoints,
    validate_checkpoint_compatibility,
    verify_openpi_checkpoint_compatibility,
)
from acrlpd.seeds.configs import (
    ACRLPD_V2_ALOHA_FOLD,
    ACRLPD_V2_DROID,
    ACRLPD_V2_LIBERO,
    ACRLPDTrainingConfig,
    CriticConfig,
    create_cosine_schedule,
    get_aloha_acrlpd_config,
    get_aloha_config,
    get_droid_acrlpd_config,
    get_droid_config,
    get_libero_acrlpd_config,
    get_libero_config,
    merge_configurations,
    validate_config_compatibility,
)
from acrlpd.seeds.data import (
    ACRLPDDataLoader,
    create_acrlpd_data_loader,
    create_lerobot_acrlpd_dataloader,
    validate_qchunking_batch_format,
)
from acrlpd.seeds.fsdp import (
    create_fsdp_mesh,
    create_fsdp_sharding_strategy,
    create_fsdp_train_step_fn,
    create_global_optimizers,
    init_acrlpd_fsdp_training,
    init_fsdp_train_state,
    optimize_fsdp_memory,
    setup_fsdp_sharding,
    validate_fsdp_sharding,
)
from acrlpd.seeds.memory import GPUMemoryMonitor, get_gpu_memory_usage, log_gpu_memory, log_memory_usage, memory_monitor
from acrlpd.seeds.pytree_checker import (
    check_optimizer_consistency,
    check_pytree_leaf_dtypes,
    compare_pytree_structures,
    diagnose_pytree_structure,
    validate_fsdp_compatibility,
)
from acrlpd.seeds.trainer import (
    ACRLPDTrainer,
    ACRLPDTrainingLoop,
    create_training_components,
    run_training_experiment,
    setup_jax_environment,
    unified_training_interface,
)
