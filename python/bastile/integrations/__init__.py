"""What trainers that compute their own loss need of Bastile.

    log_probs_from_hidden   log-probabilities of targets from hidden states and the head's weight, sharded or not
    divergence_from_hidden  a student's divergence from a teacher, likewise
    trl, verl, prime_rl, nemo_rl
                            put it into these: bastile.apply() does it, nothing is to be called
    axolotl, torchtune      its plugin, its loss
    everywhere              a module whose import is bastile.apply()

docs/trainers.md says what is served in which trainer, and what others need."""

from bastile.integrations.hidden import divergence_from_hidden, log_probs_from_hidden

__all__ = ["divergence_from_hidden", "log_probs_from_hidden"]
