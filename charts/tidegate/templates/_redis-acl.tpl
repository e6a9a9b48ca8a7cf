{{/*
What each user of Redis may do, as in Redis' ACL. A policy is the operator's to write and to
announce: engines may read it. Patterns can't meet: no name of a pool holds a colon. */}}

{{- define "tidegate.redisRules.operator" -}}
- "~tidegate:*:policy"
- "%R~tidegate:*:engine:*"
- "&tidegate:*:wake"
- "&tidegate:*:reports"
{{- range splitList " " "hget hmget hset publish psubscribe punsubscribe scan mget evalsha script|load ping select client|setname" }}
- "+{{ . }}"
{{- end }}
{{- end -}}

{{- define "tidegate.redisRules.engine" -}}
- "%R~tidegate:*:policy"
- "~tidegate:*:engine:*"
- "~tidegate:*:rate:*"
- "~tidegate:*:rate-engines"
- "~tidegate:*:service"
- "~tidegate:*:active"
- "&tidegate:*:wake"
{{- range splitList " " "hget hmget hgetall hset hdel hincrbyfloat set expire pexpire zadd zrem zremrangebyscore zcard zrange time subscribe unsubscribe evalsha script|load ping select client|setname" }}
- "+{{ . }}"
{{- end }}
- "(&tidegate:*:reports +publish)"
{{- end -}}
