"""Models beside the policy that judge its rollouts: reward models, and a teacher."""
