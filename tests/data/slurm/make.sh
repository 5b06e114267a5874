#!/bin/bash
# Makes the dumps beside this script with a real Slurm on this machine alone: slurmctld, slurmdbd, MariaDB and a slurmd per node.
#
#   apt-get install --no-install-recommends slurm-wlm slurmdbd mariadb-server munge     (Debian 12: Slurm 22.05.8), then as root
#   ./make.sh FOLDER [OUTPUT]
#
# Everything runs below FOLDER and listens on loopback. Two nodes pretend to have four A100 each, one to have four V100: GPUs are
# empty files. The jobs only sleep. Users are accounts that every Debian has; the dump calls them alice, bob and carol.
# It takes about four minutes: a time limit is a minute or more.
set -eu
lab=$(realpath -m "$1") out=$(realpath -m "${2:-$(dirname "$0")}")
mkdir -p "$lab"/{munge,db,state,log,gpus} && chmod 755 "$lab" && cd "$lab"
host=$(hostname -s)
for gpu in {0..11}; do : > "gpus/$gpu"; done

cat > slurmdbd.conf <<END
AuthType=auth/munge
AuthInfo=socket=$lab/munge/socket
DbdHost=$host
DbdAddr=127.0.0.1
DbdPort=16819
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=13306
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm
PidFile=$lab/slurmdbd.pid
LogFile=$lab/log/slurmdbd
END
chmod 600 slurmdbd.conf
cat > slurm.conf <<END
ClusterName=lab
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$lab/munge/socket
StateSaveLocation=$lab/state
SlurmdSpoolDir=$lab/spool-%n
SlurmctldPidFile=$lab/slurmctld.pid
SlurmdPidFile=$lab/slurmd-%n.pid
SlurmctldLogFile=$lab/log/slurmctld
SlurmdLogFile=$lab/log/slurmd-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,sched_min_interval=100000
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=16819
AccountingStoragePass=$lab/munge/socket
AccountingStorageTRES=gres/gpu,gres/gpu:a100,gres/gpu:v100
ReturnToService=2
MpiDefault=none
MinJobAge=600
KillWait=2
JobRequeue=1
GresTypes=gpu
NodeName=a1 NodeAddr=127.0.0.1 Port=17001 CPUs=16 Boards=1 SocketsPerBoard=1 CoresPerSocket=16 ThreadsPerCore=1 Gres=gpu:a100:4 Feature=a100
NodeName=a2 NodeAddr=127.0.0.1 Port=17002 CPUs=16 Boards=1 SocketsPerBoard=1 CoresPerSocket=16 ThreadsPerCore=1 Gres=gpu:a100:4 Feature=a100
NodeName=v1 NodeAddr=127.0.0.1 Port=17003 CPUs=16 Boards=1 SocketsPerBoard=1 CoresPerSocket=16 ThreadsPerCore=1 Gres=gpu:v100:4 Feature=v100
PartitionName=train Nodes=a1,a2,v1 Default=YES MaxTime=01:00:00 PriorityTier=2
PartitionName=spare Nodes=a1,a2,v1 MaxTime=01:00:00 PriorityTier=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
END
cat > gres.conf <<END
NodeName=a1 Name=gpu Type=a100 File=$lab/gpus/[0-3]
NodeName=a2 Name=gpu Type=a100 File=$lab/gpus/[4-7]
NodeName=v1 Name=gpu Type=v100 File=$lab/gpus/[8-11]
END
export SLURM_CONF=$lab/slurm.conf TZ=UTC

started=()
stop() { for pid in "${started[@]}"; do kill "$pid" 2> /dev/null || true; done; }
trap stop EXIT
until_it_works() { for _ in {1..1200}; do "$@" > /dev/null 2>&1 && return; sleep 0.2; done; echo "this never worked: $*" >&2; exit 1; }

chown -R mysql "$lab/db" && chown -R munge "$lab/munge"
[ -d db/mysql ] || mariadb-install-db --no-defaults --user=mysql --datadir="$lab/db" > log/mariadb-install 2>&1
mariadbd --no-defaults --user=mysql --datadir="$lab/db" --socket="$lab/db/socket" --port=13306 --bind-address=127.0.0.1 \
    --innodb-buffer-pool-size=64M > log/mariadbd 2>&1 & started+=($!)
database() { mariadb --no-defaults --socket="$lab/db/socket" "$@"; }
until_it_works database -e "select 1"
for at in localhost 127.0.0.1; do
    database -e "create or replace user slurm@'$at' identified by 'slurm'; grant all on *.* to slurm@'$at'"
done

head -c 1024 /dev/urandom > munge/key && chown munge munge/key && chmod 400 munge/key
setpriv --reuid=munge --regid=munge --clear-groups munged --foreground --socket="$lab/munge/socket" --key-file="$lab/munge/key" --pid-file="$lab/munge/pid" \
    --log-file="$lab/munge/log" --seed-file="$lab/munge/seed" --num-threads=10 --force > log/munged 2>&1 & started+=($!)
until_it_works test -S munge/socket
slurmdbd -D > log/slurmdbd-out 2>&1 & started+=($!)
until_it_works sacctmgr -n list cluster
{ sacctmgr -i add cluster lab && sacctmgr -i add account vision,speech && sacctmgr -i add user games,news account=vision &&
    sacctmgr -i add user irc account=speech; } > log/sacctmgr
slurmctld -D > log/slurmctld-out 2>&1 & started+=($!)
for node in a1 a2 v1; do
    mkdir -p "spool-$node"
    slurmd -D -N "$node" > "log/slurmd-$node-out" 2>&1 & started+=($!)
done
until_it_works sh -c '[ "$(sinfo -h -N -p train -t idle | wc -l)" = 3 ]'

as() { user=$1; shift; runuser -u "$user" -- sbatch --parsable -D / -o /dev/null "$@"; }
state() { scontrol show job "$1" | grep -q "JobState=$2"; }
export -f state

as games -J resnet50 --gres=gpu:a100:2 -t 5 --wrap "srun sleep 8" > /dev/null
as games -J resnet50 --gres=gpu:a100:4 -t 5 --wrap "sleep 12" > /dev/null
as news -J any-type --gres=gpu:4 -t 10 --wrap "sleep 10" > /dev/null
as irc -J gang -N 2 --gres=gpu:a100:4 -t 10 --wrap "srun sleep 15" > /dev/null
as irc -J broken --gres=gpu:1 --wrap "sleep 3; exit 1" > /dev/null
as news -J sweep --array=0-5%3 --gres=gpu:a100:1 --wrap 'sleep $((3 + SLURM_ARRAY_TASK_ID)); [ $SLURM_ARRAY_TASK_ID != 4 ]' > /dev/null
as games -J preprocess --wrap "sleep 5" > /dev/null
as irc -J over-types --gpus=6 --wrap "sleep 7" > /dev/null
as games -J pair --gres=gpu:a100:1 : --gres=gpu:v100:1 --wrap "sleep 6" > /dev/null
as news -J by-feature -C v100 --gres=gpu:2 --wrap "sleep 9" > /dev/null
first=$(as games -J stage-1 --gres=gpu:1 --wrap "sleep 5")
as games -J stage-2 --gres=gpu:1 -d "afterok:$first" --wrap "sleep 4" > /dev/null
overrun=$(as irc -J overrun -t 1 --gres=gpu:v100:1 --wrap "sleep 600")
stopped=$(as news -J stopped --gres=gpu:a100:1 --wrap "sleep 600")
later=$(as news -J later --begin=now+1hour --gres=gpu:a100:1 --wrap "sleep 5")
again=$(as irc -J again --requeue --gres=gpu:a100:2 --wrap "sleep 14")
until_it_works state "$again" RUNNING && sleep 5 && scontrol requeue "$again"
until_it_works state "$stopped" RUNNING && sleep 4 && runuser -u news -- scancel "$stopped" "$later"
withdrawn=$(as news -J withdrawn -N 2 --gres=gpu:a100:4 --wrap "sleep 5") && runuser -u news -- scancel "$withdrawn"
spare=$(as games -J spare -p spare --gres=gpu:a100:4 --wrap "sleep 20")
until_it_works state "$spare" RUNNING && sleep 4
as irc -J urgent -N 2 --gres=gpu:a100:4 --wrap "sleep 6" > /dev/null
for seconds in 2 11 5 17 3 8 13 4 6 9; do
    as news -J "short-$seconds" --gres=gpu:$((1 + seconds % 3)) --wrap "sleep $seconds" > /dev/null; sleep 1
done
lost=$(as games -J lost --no-requeue --gres=gpu:v100:1 --wrap "sleep 600")
moved=$(as games -J moved --requeue --gres=gpu:v100:2 --wrap "sleep 12")
until_it_works state "$lost" RUNNING && until_it_works state "$moved" RUNNING && sleep 3
until_it_works state "$overrun" TIMEOUT || true
scontrol update node=v1 state=down reason=test && sleep 1
scontrol update node=v1 state=resume || true  # it may have come back by itself
until_it_works state "$moved" COMPLETED || sleep 120
until_it_works state "$spare" COMPLETED
running=$(as irc -J running --gres=gpu:a100:4 --wrap "sleep 600")
as irc -J tail --array=0-9%1 --gres=gpu:a100:1 --wrap "sleep 600" > /dev/null
until_it_works state "$running" RUNNING && sleep 15  # until the database has them

rename() { sed -e "s/games/alice/g; s/news/bob/g; s/irc/carol/g; s#$lab#/lab#g; s/$host/node/g"; }
columns=JobID,JobIDRaw,JobName,User,Account,Partition,QOS,Submit,Eligible,Start,End,Elapsed,ElapsedRaw,State,ExitCode,ReqTRES,AllocTRES
columns=$columns,NNodes,AllocNodes,Timelimit,Priority,Constraints,Cluster
sacct -a -S now-1hour --duplicates --parsable2 --format="$columns" | rename > "$out/sacct.txt"
sacct -a -S now-1hour -X --json | python3 -c "
import json, sys
log = json.load(sys.stdin)
print('{\"meta\": ' + json.dumps(log['meta']) + ', \"errors\": [], \"jobs\": [')
print(',\n'.join(map(json.dumps, log['jobs'])))
print(']}')" | rename > "$out/sacct.json"
